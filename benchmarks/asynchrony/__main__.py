"""Asynchronous against synchronous training: measure what is missing, or report on what there is.

    python -m benchmarks.asynchrony calibrate            # what an episode and a step cost, before anything is predicted
    python -m benchmarks.asynchrony predict              # what every cell should come to, before it is measured
    python -m benchmarks.asynchrony run --kind score     # runs to a held-out score; resumable, a line a run
    python -m benchmarks.asynchrony run --kind speed     # seconds a step in the other cells
    python -m benchmarks.asynchrony report               # tables and pictures

Runs are made seed by seed, the arms of a seed in a drawn order. A run during which other programs took more than
12 % of the machine is refused and made again. Ctrl-C ends the run that is being made and keeps those that are finished;
the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from agentrl.api.blocking import blocking
from agentrl.errors import AgentRLError, DataError
from benchmarks.asynchrony import records
from benchmarks.asynchrony.arms import ARMS, SIGMAS
from benchmarks.asynchrony.predict import CALIBRATION, FOLDER, PREDICTIONS
from benchmarks.asynchrony.sweep import MAX_OTHERS, STEPS, sweep

RUNS = FOLDER / "runs.jsonl"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.asynchrony",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = found.add_subparsers(dest="what", required=True, metavar="calibrate|predict|run|report")
    calibrate = commands.add_parser("calibrate", help=f"measure the machine, into {CALIBRATION.name}: some minutes")
    commands.add_parser("predict", help=f"from it, write {PREDICTIONS.name}: about 2 minutes")
    run = commands.add_parser("run", help="make the runs that --runs does not have", formatter_class=_Defaults)
    report = commands.add_parser("report", help="fill the tables and pictures of docs/", formatter_class=_Defaults)
    for command in (calibrate, run):
        command.add_argument("--config", type=Path, help="default: configs/quickstart.yaml")
        command.add_argument("--model", help="folder of the model that all runs begin with; made where it is missing")
    for command in (run, report):
        command.add_argument("--runs", type=Path, default=RUNS, help="file with a line a run")
    run.add_argument("--kind", choices=tuple(STEPS), default="score", help="score: also measure the weights, every 4th")
    names = ", ".join(ARMS)
    run.add_argument("--arms", nargs="+", metavar="ARM", default=list(ARMS), choices=list(ARMS), help=f"of {names}")
    run.add_argument("--sigmas", nargs="*", type=float, default=list(SIGMAS), help="spread of the waits; may be empty")
    run.add_argument("--no-wait", action="store_true", help="the control without waits as well")
    run.add_argument("--seeds", nargs="+", type=int, default=list(range(4)), help="of the tasks and of the waits")
    run.add_argument("--steps", type=int, help="if not 16 (score) or 8 (speed), and as many more as the arm may lag")
    run.add_argument("--real-sleep", action="store_true", help="sleep every second of a wait")
    run.add_argument("--max-others", type=float, default=MAX_OTHERS, help="share of the machine for others, 0 to 1")
    return found


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def check(given: argparse.Namespace) -> None:
    """Raises DataError for options of `run` that could not give a number."""
    if given.steps is not None:
        for arm in given.arms:
            if given.steps <= (first := records.warm_up(arm)):
                raise DataError(
                    f"--steps {given.steps}: the first {first} steps of {arm} are not counted; use {first + 1} or more"
                )
    if not 0 <= given.max_others <= 1:
        raise DataError(f"--max-others {given.max_others:g}: it is a share of the machine, use 0 to 1")
    if any(sigma < 0 for sigma in given.sigmas):
        raise DataError(f"--sigmas {min(given.sigmas):g}: a spread is 0 or more")
    if not given.sigmas and not given.no_wait:
        raise DataError("--sigmas is empty: add --no-wait for the control without waits")


def calibration(path: Path = CALIBRATION) -> dict[str, float]:
    """What `calibrate` measured. Raises DataError where it is missing or broken."""
    again = "run `python -m benchmarks.asynchrony calibrate` first"
    if not path.exists():
        raise DataError(f"{path} is missing: {again}")
    try:
        found = json.loads(path.read_text())
        return {name: float(found[name]) for name in ("mean_wait_s", "calls_mean")}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is no calibration ({error!r}): remove it, and {again}") from error


def _calibrate(given: argparse.Namespace) -> None:
    if CALIBRATION.exists():
        raise DataError(
            f"{CALIBRATION} is there: the predictions and the runs belong to it, and runs under another calibration "
            f"wait for other times. To measure anew, remove it with {PREDICTIONS.name} and {RUNS.name} first"
        )
    from benchmarks.asynchrony.calibrate import calibrated
    from benchmarks.asynchrony.stage import QUICKSTART

    found = blocking(calibrated(given.config or QUICKSTART, given.model))
    CALIBRATION.write_text(json.dumps(found, indent=1) + "\n")


def _predict() -> None:
    if RUNS.exists():
        raise DataError(f"{RUNS} has runs: what is written after them is no prediction. Move it away to predict again")
    from benchmarks.asynchrony import predict

    predict.main()


def _run(given: argparse.Namespace) -> None:
    check(given)
    found = calibration()
    given.runs.parent.mkdir(parents=True, exist_ok=True)
    blocking(sweep(given, mean_wait_s=found["mean_wait_s"], calls=found["calls_mean"]))


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    given = parser().parse_args(arguments)
    try:
        if given.what == "calibrate":
            _calibrate(given)
        elif given.what == "predict":
            _predict()
        elif given.what == "run":
            _run(given)
        else:
            if given.runs != RUNS and not given.runs.exists():
                raise DataError(f"--runs {given.runs}: no such file")
            from benchmarks.asynchrony import report

            report.main(runs=given.runs)
    except KeyboardInterrupt:
        print("stopped: what was finished is kept, and the same command goes on", file=sys.stderr)
        return 130
    except AgentRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
