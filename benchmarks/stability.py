"""Which rule survives stale data? A calculator toy under a fixed lag, trained with the project's own objective.

Each step trains on 8 tasks x 8 episodes that the weights of `lag` steps ago sampled, with AdamW and gradient clip 1.
The runs of one rule and lag (one per seed) are computed together.

    python -m benchmarks.stability --out stability.jsonl             # the sweep: resumable, a line a run
    python -m benchmarks.stability --out stability.jsonl --report    # tables to the terminal, pictures to docs/

What is counted was fixed before the sweep. The reward of weights is that of the training episodes that they sampled.

    collapsed    the last weights solve less than half (of 256 fresh problems) of what the run's best 20 weights in a
                 row solved
    fell         at some time 20 weights in a row solved less than half of the best 20 before them; some recover
    steps to 90% the first weights at which the last 20 solved at least 0.9 on average
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import stability_pictures, stability_report
from benchmarks.reporting import load_runs
from benchmarks.stability_rules import RULES
from benchmarks.stability_train import Spec, Stack, record

ON_POLICY_TWINS = {"opob_code": "opob", "opob_no_w2": "opob", "tis": "mean", "uncorrected": "mean"}
"""Rules that equal another rule when all weights are 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A block of the sweep: every rule at every lag, all seeds together."""

    rules: Sequence[str]
    lags: Sequence[int]
    lr: float
    num_steps: int
    seeds: Sequence[int]
    switches: Sequence[int | None] = (None,)
    """Steps at which separate runs change..."""
    is_control: bool = False
    """... to other random numbers, and not to min(b*, mean)."""

    def stacks(self) -> Iterator[list[Spec]]:
        """What is computed together."""
        for lag in self.lags:
            for rule in self.rules:
                if lag == 0 and rule in ON_POLICY_TWINS:
                    continue
                yield [self._spec(rule, lag, seed, switch) for switch in self.switches for seed in self.seeds]

    def _spec(self, rule: str, lag: int, seed: int, switch: int | None) -> Spec:
        spec = Spec(rule=rule, lag=lag, seed=seed, lr=self.lr, num_steps=self.num_steps)
        return (
            spec if switch is None else replace(spec, then=rule if self.is_control else "opob_safe", switch_at=switch)
        )


def key(run: dict[str, Any] | Spec) -> tuple[Any, ...]:
    """The key of a run."""
    names = ("rule", "lag", "seed", "lr", "num_steps", "then", "switch_at")
    return tuple(run[name] if isinstance(run, dict) else getattr(run, name) for name in names)


def sweep(parts: Sequence[Part], out: Path) -> None:
    """Run what `out` does not have yet."""
    torch.set_num_threads(1)
    done = {key(run) for run in load_runs(out)}
    for part in parts:
        for specs in part.stacks():
            specs = [spec for spec in specs if key(spec) not in done]
            if not specs:
                continue
            wall, cpu = time.perf_counter(), time.process_time()
            stack = Stack(specs)
            stack.run()
            runs = record(stack)
            with out.open("a") as file:
                file.writelines(json.dumps(run) + "\n" for run in runs)
            accuracies = " ".join(f"{run['accuracy']:.2f}" for run in runs)
            one = specs[0]
            print(
                f"{one.rule:12} {one.then or '':9} {one.switch_at:3} lag {one.lag:2} lr {one.lr:g}: {accuracies} in "
                f"{time.perf_counter() - wall:.0f} s, {time.process_time() - cpu:.0f} s of CPU",
                flush=True,
            )


def main() -> None:
    """Sweep, or report on one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--lags", nargs="+", type=int, default=[32, 8, 64, 2, 0])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(8)))
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cap-from", nargs="+", type=int, help="the same runs, with min(b*, mean) from these steps on")
    parser.add_argument("--control", action="store_true", help="from these steps on other random numbers, and no cap")
    parser.add_argument("--out", type=Path, default=Path("stability.jsonl"))
    parser.add_argument("--report", action="store_true", help="tables and pictures of --out instead of runs")
    parser.add_argument("--pictures", type=Path, default=Path("docs"), help="where --report draws")
    given = parser.parse_args()
    if given.report:
        runs = load_runs(given.out)
        print(stability_report.tables(runs))
        print("drawn:", *stability_pictures.draw(runs, given.pictures))
        return
    part = Part(
        rules=given.rules,
        lags=given.lags,
        lr=given.lr,
        num_steps=given.steps,
        seeds=given.seeds,
        switches=given.cap_from or [None],
        is_control=given.control,
    )
    sweep([part], given.out)


if __name__ == "__main__":
    main()
