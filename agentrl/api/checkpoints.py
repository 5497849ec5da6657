"""`agentrl eval RUN --checkpoints`: measures the weights that a run exported, and draws its curve of held-out success.

The numbers are stored in the run, under the version of each export, as if they had been measured while it trained.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from agentrl import config as configs
from agentrl.api.blocking import blocking
from agentrl.api.playing import PlayOptions, Request, play
from agentrl.buffer.journal import Journal
from agentrl.config import Config, Overrides
from agentrl.errors import ConfigError
from agentrl.report.console import EvalConsole
from agentrl.report.metrics import MetricsLog
from agentrl.report.observer import Observer, Observers
from agentrl.report.statistics import EvalResult
from agentrl.run_folder import RunFolder
from agentrl.training.evaluations import Records
from agentrl.training.model_folder import origin_of
from agentrl.training.resume import refuse_other_run
from agentrl.view.bundle import write_report


def evaluate_checkpoints(
    run: str | Path,
    overrides: Overrides = (),
    *,
    eval_set: str | None = None,
    observer: Observer | None = None,
    console: bool = False,
) -> list[EvalResult]:
    """Measure every version that a run exported on each of its held-out sets, and write its report again.

    What the run has measured already is not repeated. An engine is started for each version.

    Args:
        run: its folder or its name; it must not be training.
        overrides: of its config, such as `eval.sets.new.data=ROWS`: only what may change at a resume.
        eval_set: the only one of `eval.sets` to measure.
        observer: is told of phases and progress, and each result.
        console: print them.

    Returns the new measurements. Raises ConfigError before anything is started; otherwise as `evaluate`, and keeps what
    was measured by then.

    Example:
        for result in agentrl.api.evaluate_checkpoints("runs/quickstart"):
            print(result.policy_version, result.set_name, result.avg)
    """
    folder = RunFolder.open(run)
    config = configs.load(folder.config, overrides)
    refuse_other_run(folder, config)
    if eval_set is not None and eval_set not in config.eval.sets:
        known = ", ".join(config.eval.sets) or "none; it has one held-out set, without a name"
        raise ConfigError(f"--set: {eval_set!r} is not in the eval.sets of {folder.path}: {known}")
    sets = list(config.eval_sets) if eval_set is None else [eval_set]
    with Observers(EvalConsole() if console else None, observer) as watch, folder.locked():
        exports = _exports(folder)
        with closing(Journal(folder.journal)) as journal, MetricsLog(folder, sinks=config.metrics.sinks) as metrics:
            records = Records(run=folder, journal=journal, metrics=metrics, observer=watch)
            done = {(one.policy_version, one.set_name) for one in journal.evaluations()}
            found: list[EvalResult] = []
            for version, export in exports.items():
                left = [name for name in sets if (version, name) not in done]
                found += blocking(_measured(config, export, left, is_all=left == list(config.eval_sets), to=records))
        write_report(folder)
    return found


async def _measured(config: Config, export: Path, left: list[str], *, is_all: bool, to: Records) -> list[EvalResult]:
    found: list[EvalResult] = []
    for name in [None] if is_all else left:
        options = PlayOptions(model=str(export), eval_set=name)
        first = await play(Request.from_options(config, options, environ=os.environ), to.observer)
        for measured in (first, *first.others):
            await to.store(measured)
            found.append(measured.result)
    return found


def _exports(folder: RunFolder) -> dict[int, Path]:
    """Version -> the folder of its weights, the oldest first. Raises ConfigError where there is none."""
    folders = [file.parent for file in sorted(folder.checkpoints.glob("[!.]*/config.json"))]
    found = {origin.version: path for path in folders if (origin := origin_of(path)) is not None}
    if not found:
        raise ConfigError(
            f"{folder.path} has exported no weights: a run writes checkpoints/final at its end, and every "
            "learner.save_every steps checkpoints/step_N"
        )
    return dict(sorted(found.items()))
