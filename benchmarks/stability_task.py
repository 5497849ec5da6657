"""Stale data on a real task: the quickstart's, with its engine, sandbox and learner, under fixed lags.

Each step, the weights of `lag` steps ago play 8 tasks x 8 episodes in the engine, and the learner takes one step on all
of them: no group is dropped, so that every rule trains on as many episodes. The runs of a seed begin with the same
weights and have the same tasks; what version 0 plays (all of the first lag + 1 steps) is the same for all of them. What
the engine samples later is a run's own.

    python -m benchmarks.stability_task             # resumable: a line a run in stability_task.jsonl beside this file
    python -m benchmarks.stability_task --report    # stability_task.md, and the pictures in docs/
    python -m benchmarks.stability_task --rules opob_safe mean zero --lags 8 32 --lrs 1e-3 --rewards symmetric positive

The cells that decide come first, and in each of the two parts seeds are the outermost loop, so that every prefix of
the sweep is a fair table.
Collapsed and fell are the toy's words (stability.py), with 64 held-out tasks x 4 episodes at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from agentrl import config as config_module
from agentrl.config import Config
from agentrl.errors import AgentRLError
from benchmarks import stability_task_pictures, stability_task_report
from benchmarks.reporting import ROOT, facts, load_runs
from benchmarks.stability_report import WINDOW
from benchmarks.stability_task_rules import DEFAULT_RULES, ON_POLICY_TWINS, REWARDS, TASK_RULES
from benchmarks.stability_task_run import Run, Spec, Stage, staged

OUT = ROOT / "benchmarks" / "stability_task.jsonl"
STUDY = ("env.max_turns=4", "rollout.max_context=512", "engine.stream_interval=96")
"""Changes of the quickstart: a policy that never answers, as collapsed ones do, would play a hundred times as long."""
DECIDING = {(1e-3, 32), (1e-3, 8)}
"""(lr, lag) at which rules differ most."""
MAX_FAILURES = 5
RUNS_AT_ONCE = 3
"""One trains, one plays, and one is next. More change nothing on two cores."""


def specs_of(given: argparse.Namespace) -> list[Spec]:
    """The runs, in their order: first all seeds of the cells that decide, then all seeds of the others."""
    specs = [
        Spec(rule=rule, lag=lag, seed=seed, lr=lr, num_steps=given.steps or steps_at(lag), reward=reward)
        for seed in given.seeds
        for lag in given.lags
        for lr in given.lrs
        for reward in given.rewards
        for rule in given.rules
        if lag or rule not in ON_POLICY_TWINS
    ]
    return sorted(specs, key=lambda spec: (spec.lr, spec.lag) not in DECIDING)  # stable


def steps_at(lag: int) -> int:
    """Steps of a run: half of them at least train on what the run's own weights have played.

    >>> [steps_at(lag) for lag in (0, 8, 32)]
    [48, 48, 64]
    """
    return max(48, 2 * lag)


def missing(specs: Sequence[Spec], out: Path) -> list[Spec]:
    """Those that `out` does not have yet."""
    done = [{name: run[name] for name in Spec.__dataclass_fields__} for run in load_runs(out)]
    return [spec for spec in specs if asdict(spec) not in done]


async def sweep(config: Config, specs: Sequence[Spec], out: Path, *, wait_while: Path | None) -> None:
    """Run what `out` does not have yet."""
    async with staged(config, wait_while=wait_while) as stage, asyncio.TaskGroup() as workers:
        queue = _Queue(enumerate(missing(specs, out)), out)
        for _ in range(RUNS_AT_ONCE):
            workers.create_task(queue.work(stage))


class _Queue:
    """The runs that are left, and where their records go."""

    def __init__(self, numbered: Iterator[tuple[int, Spec]], out: Path) -> None:
        self._numbered, self._out = numbered, out
        self._facts = facts()
        self._failures = 0

    async def work(self, stage: Stage) -> None:
        """Take the next run until there is none. A run of which a part failed has no record, and is left for the next
        call of the command. Raises AgentRLError after MAX_FAILURES in a row."""
        for number, spec in self._numbered:
            try:
                run = await Run(stage, spec, number=number).record()
            except AgentRLError as error:
                self._failures += 1
                print(f"{spec}: {type(error).__name__}: {error}", flush=True)
                if self._failures == MAX_FAILURES:
                    raise
                continue
            self._failures = 0
            with self._out.open("a") as file:
                file.write(json.dumps(run | self._facts, separators=(",", ":")) + "\n")
            print(
                f"{time.strftime('%H:%M:%S')} {spec.rule:24} lag {spec.lag:2} lr {spec.lr:g} rewards {spec.reward} "
                f"seed {spec.seed}: {run['accuracy']:.2f}, {run['wall_s']} s",
                flush=True,
            )


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Raises SystemExit for steps that give no verdict."""
    commands = _parser()
    given = commands.parse_args(arguments)
    if given.steps is not None and given.steps < WINDOW:
        commands.error(f"--steps {given.steps}: whether a run collapsed needs {WINDOW} steps at least")
    if given.steps is not None and given.steps <= max(given.lags):
        commands.error(f"--steps {given.steps}: a run at lag {max(given.lags)} needs more than {max(given.lags)}")
    return given


def _parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    found.add_argument("--model", help="folder of the model that all runs begin with; made where it is missing")
    found.add_argument("--rules", nargs="+", default=DEFAULT_RULES, choices=TASK_RULES)
    found.add_argument("--lags", nargs="+", type=int, default=[32, 8, 2, 0])
    found.add_argument("--seeds", nargs="+", type=int, default=list(range(4)))
    found.add_argument("--lrs", nargs="+", type=float, default=[1e-3, 4e-4])
    found.add_argument("--rewards", nargs="+", default=["0/1"], choices=REWARDS)
    found.add_argument("--steps", type=int, help="default: 48, and 64 at lag 32")
    found.add_argument("--out", type=Path, default=OUT)
    found.add_argument("--wait-while", type=Path, help="pause while this file exists")
    found.add_argument("--report", action="store_true", help="tables and pictures of --out instead of runs")
    found.add_argument("--pictures", type=Path, default=ROOT / "docs", help="where --report draws")
    return found


def main() -> None:
    """Sweep, or report on one."""
    given = parsed()
    if given.report:
        page, runs = given.out.with_suffix(".md"), load_runs(given.out)
        page.write_text(stability_task_report.page(runs))
        print("written:", page, *stability_task_pictures.draw(runs, given.pictures))
        return
    import torch

    from trainer import ranks

    ranks.set_defaults(os.environ)
    torch.set_num_threads(1)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("trainer").setLevel(logging.ERROR)  # it warns of what is studied here
    overrides = [*STUDY, *([f"model.path={given.model}"] if given.model else [])]
    config = config_module.load(given.config, overrides)
    try:
        asyncio.run(sweep(config, specs_of(given), given.out, wait_while=given.wait_while))
    except KeyboardInterrupt:
        sys.exit("stopped: the runs that had ended are kept, and the same command goes on")


if __name__ == "__main__":
    main()
