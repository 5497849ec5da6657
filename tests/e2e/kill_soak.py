"""Repeats runs with random kills until a number of kills is reached, and compares them with undisturbed runs.

`python -m tests.e2e.kill_soak FOLDER --kills 50 --seed 1`. Half of the runs are asynchronous (max_lag 2): their episode
lengths must agree with those of the undisturbed run. Half are synchronous with seeds (max_lag 0): their final weights
must be bit-identical to its weights.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.kill_judge import (
    MAX_Z,
    different_weights,
    fates,
    judge,
    standard_errors_apart,
    trained_lengths,
)
from tests.e2e.kill_model import make_model_folder
from tests.e2e.kill_run import KillRun, Part

ASYNCHRONOUS: dict[str, Any] = {"rollout.max_lag": 2, "train.steps": 39}
SYNCHRONOUS: dict[str, Any] = {
    "rollout.max_lag": 0,
    "engine.request_seeds": True,
    "engine.max_num_seqs": 1,
    "train.steps": 24,
}
SETTINGS = {"async": ASYNCHRONOUS, "sync": SYNCHRONOUS}
KINDS = tuple(SETTINGS)
MIN_LENGTHS = 30
MAX_KILLS_A_RUN = 10
PARTS = (*[Part.LEARNER] * 4, *[Part.ENGINE] * 2, *[Part.SANDBOX] * 3, *[Part.TRAIN] * 2)
"""Weighted choice: restarting everything takes longest, and the learner is the hardest part to restart."""


@dataclass(frozen=True, kw_only=True)
class Soak:
    """Result: a Markdown table of the runs, and what was wrong with them."""

    table: str
    complaints: list[str]


def soak(folder: Path, model: Path, *, seed: int, num_kills: int) -> Soak:
    """Run the soak. Raises AssertionError if an undisturbed run does not reach its end."""
    rng = random.Random(seed)
    peace = {
        name: KillRun(folder=folder / f"{name}-peace", model=model, seed=0, settings=settings)
        for name, settings in SETTINGS.items()
    }
    for run in peace.values():
        run.go()
    fired: list[KillRun] = []
    lines, complaints = ["| run | kills | resumes | groups | s | wrong |", "|---|---|---|---|---|---|"], []
    while (left := num_kills - sum(len(run.kills) for run in fired)) > 0:
        name = KINDS[len(fired) % len(KINDS)]
        run = KillRun(
            folder=folder / f"{name}-{len(fired)}", model=model, seed=rng.randrange(10**6), settings=SETTINGS[name]
        )
        wrong = _fire(run, [rng.choice(PARTS) for _ in range(min(MAX_KILLS_A_RUN, left))], peace[name])
        fired.append(run)
        complaints += wrong
        lines.append(_line(run, wrong))
        sys.stderr.write(lines[-1] + "\n")
    bias, complaint = _length_bias(fired, peace["async"])
    lines += ["", f"{_totals(fired)}; {bias}"]
    return Soak(table="\n".join(lines), complaints=complaints + complaint)


def _fire(run: KillRun, parts: list[Part], peace: KillRun) -> list[str]:
    """Kill these parts of `run`; return what is wrong with it afterwards."""
    try:
        run.go(parts)
    except AssertionError as error:  # the remaining runs still tell something
        sys.stderr.write(f"{error}\n")
        return [str(error).partition(";")[0]]
    wrong = judge(run.run.path, run.config)
    if not run.config.rollout.max_lag:
        wrong += [f"{name} is not as in peace" for name in different_weights(run.run, peace.run)]
    return wrong


def _length_bias(fired: list[KillRun], peace: KillRun) -> tuple[str, list[str]]:
    """Compare the lengths of trained episodes with the undisturbed run; a complaint if they differ beyond chance."""
    lengths = [length for run in fired if run.config.rollout.max_lag for length in trained_lengths(run.run).values()]
    if len(lengths) < MIN_LENGTHS:
        return "too few asynchronous groups to compare their lengths", []
    apart = standard_errors_apart(lengths, list(trained_lengths(peace.run).values()))
    bias = f"lengths {apart:+.2f} standard errors from those in peace, of {len(lengths)} groups"
    return bias, [bias] if abs(apart) > MAX_Z else []


def _totals(fired: list[KillRun]) -> str:
    killed = Counter(kill.part for run in fired for kill in run.kills)
    parts = ", ".join(f"{number} {part}" for part, number in sorted(killed.items()))
    return f"{killed.total()} kills in {len(fired)} runs: {parts}"


def _line(run: KillRun, wrong: list[str]) -> str:
    kills = ", ".join(f"{kill.part} after step {kill.after_step}" for kill in run.kills)
    states = Counter(fate.state for fate in fates(run.run.journal))
    groups = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    return f"| {run.folder.name} | {kills} | {run.num_resumes} | {groups} | {run.seconds:.0f} | {'; '.join(wrong)} |"


def main() -> int:
    """Exit code: 0 if nothing was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    sys.stderr.write(f"seed {arguments.seed}\n")
    arguments.folder.mkdir(parents=True)
    model = make_model_folder(arguments.folder / "model")
    result = soak(arguments.folder, model, seed=arguments.seed, num_kills=arguments.kills)
    sys.stdout.write("\n".join([result.table, *result.complaints]) + "\n")
    return bool(result.complaints)


if __name__ == "__main__":
    sys.exit(main())
