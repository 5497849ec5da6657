"""What a newcomer's first runs come to: the quickstart and the tutorial, each by `agentrl train` in a fresh folder.

`python -m benchmarks.first_hour [--runs quickstart tutorial] [--seeds 0 1 2] [--lock FILE]` adds a row for each to
benchmarks/first_hour.json and writes benchmarks/first_hour.md. Set-up (`make setup`) is not part of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

from agentrl.report.metrics import MetricsLine, read
from benchmarks import reporting

REPORT = Path(__file__).with_suffix(".md")
QUICKSTART = reporting.ROOT / "configs" / "quickstart.yaml"
PAGE = reporting.ROOT / "docs" / "write-an-environment.md"
RUNS = ("quickstart", "tutorial")
_PHASE = re.compile(r"^(?P<name>[a-z][^:\n]*(?:: [a-z ]+)?): (?P<seconds>\d+\.\d) s$", re.MULTILINE)
TIMEOUT_S = 3600.0  # of one run
_CURVE_STEPS = 5  # mean rewards of so many steps make one point of the curve


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRun:
    """What one run came to."""

    run: str  # one of RUNS
    seed: int
    settings: tuple[str, ...]  # overrides on the command line
    header: str  # date, commit and machine, when the run began
    before: float  # avg@n on held-out tasks
    after: float
    pass_before: float  # pass@n
    pass_after: float
    steps: int
    curve: tuple[float, ...]  # mean reward of the finished groups, five steps a point
    groups_trained: int
    groups_equal: int  # dropped because all members had the same reward
    minutes: float  # wall time of the whole command
    train_minutes: float  # the training loop with the measurements in between
    phases_s: dict[str, float]  # what came before it

    @property
    def rise(self) -> float:
        """avg@n after training minus before."""
        return self.after - self.before

    @property
    def useful_share(self) -> float:
        """Of the groups that ended, those with a gradient."""
        return self.groups_trained / max(1, self.groups_trained + self.groups_equal)


def write_tutorial(folder: Path) -> None:
    """Write the two files of docs/write-an-environment.md into `folder`, as a reader pastes them."""
    for language, name in (("python", "library.py"), ("yaml", "library.yaml")):
        (folder / name).write_text(the_block(language))


def the_block(language: str) -> str:
    """The page's only block in this language. Raises ValueError when there are more or none."""
    (code,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return str(code)


def measure(run: str, seed: int, settings: Sequence[str] = (), *, folder: Path | None = None) -> FirstRun:
    """Train in `folder`, by default a new one that is removed. Raises RuntimeError with the output when it fails."""
    with ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-first-hour-")))
        if run == "tutorial":
            write_tutorial(place)
        config = "library.yaml" if run == "tutorial" else str(QUICKSTART)
        header = reporting.header(run, {}).split("\n", 2)[2]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "agentrl", "train", config, f"seed={seed}", *settings],
            cwd=place,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(reporting.ROOT), "COLUMNS": "200"},
            timeout=TIMEOUT_S,
        )
        minutes = (time.monotonic() - began) / 60
        if done.returncode:
            raise RuntimeError(f"{run}, seed {seed}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        (metrics,) = place.glob("runs/*/metrics.jsonl")
        return _first_run(run, seed, settings, header, read(metrics), done.stdout, minutes)


def _first_run(
    run: str, seed: int, settings: Sequence[str], header: str, lines: Sequence[MetricsLine], output: str, minutes: float
) -> FirstRun:
    steps = [line.values for line in lines if line.kind == "step"]
    first, *_, last = [line.values for line in lines if line.kind == "eval"]
    rewards = [values["rollout/reward_mean"] for values in steps]
    points = [rewards[i : i + _CURVE_STEPS] for i in range(0, len(rewards), _CURVE_STEPS)]
    return FirstRun(
        run=run,
        seed=seed,
        settings=tuple(settings),
        header=header,
        before=first["eval/avg_at_n"],
        after=last["eval/avg_at_n"],
        pass_before=first["eval/pass_at_n"],
        pass_after=last["eval/pass_at_n"],
        steps=len(steps),
        curve=tuple(round(sum(point) / len(point), 3) for point in points),
        groups_trained=int(steps[-1]["ledger/trained"]),
        groups_equal=int(steps[-1]["ledger/dropped_zero_variance"]),
        minutes=minutes,
        train_minutes=next(line.values["run/train_s"] for line in lines if "run/train_s" in line.values) / 60,
        phases_s={found["name"]: float(found["seconds"]) for found in _PHASE.finditer(output)},
    )


def report(runs: Sequence[FirstRun]) -> str:
    """The report, as Markdown."""
    parts = ["# The first hour: quickstart and tutorial\n", __doc__.split("\n\n", 1)[1]]
    for name in RUNS:
        rows = [run for run in runs if run.run == name]
        if rows:
            parts.append(f"\n## {name.capitalize()}\n\n{_learned(rows)}\n{_spent(rows)}")
    parts.append("\n## Machine and commit of each run\n")
    parts += [f"\n{run.run}, seed {run.seed}{_with(run)}:\n\n{run.header}" for run in runs]
    return "\n".join(line.rstrip() for line in "".join(parts).split("\n"))


def _with(run: FirstRun) -> str:
    return f", with {' '.join(run.settings)}" if run.settings else ""


def _learned(runs: Sequence[FirstRun]) -> str:
    columns = ("seed", "avg@n before", "after", "rise", "pass@n before", "after", "steps", "useful groups")
    rows = [
        (
            f"{run.seed}{_with(run)}",
            f"{run.before:.3f}",
            f"{run.after:.3f}",
            f"{run.rise:+.3f}",
            f"{run.pass_before:.3f}",
            f"{run.pass_after:.3f}",
            run.steps,
            f"{run.useful_share:.0%} of {run.groups_trained + run.groups_equal}",
        )
        for run in runs
    ]
    curves = [
        f"- seed {run.seed}: mean reward, {_CURVE_STEPS} steps a point: {', '.join(f'{one:.2f}' for one in run.curve)}"
        for run in runs
    ]
    return reporting.table(columns, rows) + "\n" + "\n".join(curves) + "\n"


def _spent(runs: Sequence[FirstRun]) -> str:
    """Minutes by phase."""
    phases = list(dict.fromkeys(name for run in runs for name in run.phases_s))
    columns = ("minutes, seed", *phases, "training", "whole command")
    rows = [
        (
            run.seed,
            *(f"{run.phases_s.get(name, 0) / 60:.1f}" for name in phases),
            f"{run.train_minutes:.1f}",
            f"{run.minutes:.1f}",
        )
        for run in runs
    ]
    return reporting.table(columns, rows)


def _load(path: Path) -> list[FirstRun]:
    """What was measured so far."""
    rows = json.loads(path.read_text()) if path.exists() else []
    return [FirstRun(**{**row, "settings": tuple(row["settings"]), "curve": tuple(row["curve"])}) for row in rows]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=RUNS, help="none: report only")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides, for both")
    parser.add_argument("--lock", type=Path, help="file to lock during each run, on a machine shared with others")
    parser.add_argument("--results", type=Path, default=REPORT.with_suffix(".json"), help="runs measured so far")
    parser.add_argument("--out", type=Path, default=REPORT)
    options = parser.parse_args()
    for run in options.runs:
        for seed in options.seeds:
            with ExitStack() as stack:
                if options.lock is not None:
                    flock(stack.enter_context(options.lock.open("w")), LOCK_EX)
                found = measure(run, seed, options.set)
            key = (run, seed, found.settings)
            runs = [one for one in _load(options.results) if (one.run, one.seed, one.settings) != key] + [found]
            runs.sort(key=lambda one: (one.run, one.settings, one.seed))
            options.results.write_text(json.dumps([dataclasses.asdict(one) for one in runs], indent=1) + "\n")
            options.out.write_text(report(runs))
            print(f"{run}, seed {seed}: {found.before:.3f} -> {found.after:.3f} in {found.minutes:.1f} minutes")
    options.out.write_text(report(_load(options.results)))


if __name__ == "__main__":
    main()
