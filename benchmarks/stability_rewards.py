"""Do the rules for stale data survive when rewards are not 0 and 1? The calculator toy, paid in five ways.

Rules, verdicts and training are those of stability.py, the payments those of stability_payment.py.

    nice -n 19 python -m benchmarks.stability_rewards             # the sweep: resumable, a line a run
    python -m benchmarks.stability_rewards --report               # tables into benchmarks/stability_rewards.md
    python -m benchmarks.stability_rewards --tune-alpha           # the share that the control `scaled_mean` is tuned to

Stacks of eight seeds, the deciding ones first, so that what is finished is a fair table at any time. While the file
that --pause names exists, no stack is begun.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import stability_rewards_report, stability_rules
from benchmarks.reporting import ROOT, load_runs
from benchmarks.stability_payment import Payment
from benchmarks.stability_report import has_collapsed, has_fallen, lowest_after, of_steps, steps_to
from benchmarks.stability_train import Spec, Stack, record

LR = 1e-3
NUM_STEPS = 200
SEEDS = range(8)
THINNED = 5
POLL_S = 5.0
DECIDING = ("opob_safe", "scaled_mean", "opob_safe_leave_one_out", "opob_leave_one_out", "zero", "opob")
OTHERS = ("zero_dropped", "mean", "leave_one_out")
KEY = ("payment", "lag", "rule", "seed", "lr", "num_steps")
Run = dict[str, Any]


def cells() -> Iterator[tuple[str, Payment, int]]:
    """(rule, payment, lag) in the order of the sweep."""
    first: tuple[Payment, ...] = ("binary", "floor")
    then: tuple[Payment, ...] = ("noisy", "signed", "shaped")
    for lag in (32, 8, 0):
        for rules, payments in ((DECIDING, first), (OTHERS, first[:1]), (DECIDING, then), (OTHERS, first[1:] + then)):
            yield from ((rule, payment, lag) for payment in payments for rule in rules)


def summary(run: Run) -> Run:
    """What is kept of a run: its settings, verdicts, every 5th weights' reward and medians over its steps."""
    spec = {name: run[name] for name in KEY}
    curve = run["curve"]
    down, up = (sum(run["steps"][name]) for name in ("down", "up"))
    return {
        **spec,
        "accuracy": run["accuracy"],
        "collapsed": has_collapsed(run),
        "fell": has_fallen(run),
        "steps_to_90": steps_to(run),
        "lowest_after_90": lowest_after(run),
        "curve": [round(sum(curve[i : i + THINNED]) / THINNED, 3) for i in range(0, len(curve) - THINNED + 1, THINNED)],
        "down_share": round(down / (down + up), 4) if down + up else None,
        "shift": float(f"{of_steps(run, 'shift', lambda values: sum(values) / len(values)):.4g}"),
        "rho": of_steps(run, "rho"),
        "grad_norm": of_steps(run, "grad_norm"),
        "variance": of_steps(run, "variance"),
        "refused": sum(run["steps"]["refused"]),
    }


def sweep(out: Path, pause: Path, seeds: Sequence[int]) -> None:
    """Run what `out` does not have yet."""
    done = {tuple(run[name] for name in KEY) for run in load_runs(out)}
    for rule, payment, lag in cells():
        specs = [Spec(rule=rule, lag=lag, seed=s, lr=LR, num_steps=NUM_STEPS, payment=payment) for s in seeds]
        specs = [spec for spec in specs if tuple(getattr(spec, name) for name in KEY) not in done]
        if not specs:
            continue
        while pause.exists():
            time.sleep(POLL_S)
        wall, cpu = time.perf_counter(), time.process_time()
        runs = trained(specs)
        with out.open("a") as file:
            file.writelines(json.dumps(run) + "\n" for run in runs)
        accuracies = " ".join(f"{run['accuracy']:.2f}" for run in runs)
        print(
            f"{rule:24} {payment:7} lag {lag:2}: {accuracies} in {time.perf_counter() - wall:.0f} s, "
            f"{time.process_time() - cpu:.0f} s of CPU",
            flush=True,
        )


def trained(specs: Sequence[Spec]) -> list[Run]:
    """Train a stack; what it held is free when this returns, so that a sweep that waits is small."""
    stack = Stack(specs)
    stack.run()
    return [summary(dict(run)) for run in record(stack)]


class _Meter:
    """`opob_safe`, which notes how much it and parts of the mean push down and up on the same groups.

    Also how often one episode has more than half of sum w^2 n^2, and whether it succeeded.
    """

    def __init__(self) -> None:
        self.num_groups, self.dominating = 0, {"success": 0, "failure": 0}
        self.alphas = torch.linspace(0, 1, 21, dtype=torch.float64)
        self.down_R, self.up_R = torch.zeros(22, dtype=torch.float64), torch.zeros(22, dtype=torch.float64)

    def __call__(self, used_G: Tensor, weight_G: Tensor, norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
        safe = stability_rules.safe(used_G, weight_G, norm_G, reward_G)
        if safe is None:
            return None
        parts = reward_G.min() + self.alphas * (reward_G.mean() - reward_G.min())
        push_RG = (reward_G - torch.cat([safe[None], parts])[:, None]) * used_G.exp() * norm_G
        self.down_R -= push_RG.clamp(max=0).sum(1)
        self.up_R += push_RG.clamp(min=0).sum(1)
        share_G = torch.softmax(2 * (used_G + norm_G.log()), 0)
        self.num_groups += 1
        if share_G.max() > 0.5:
            self.dominating["success" if reward_G[share_G.argmax()] == reward_G.max() else "failure"] += 1
        return safe


def tune_alpha(lag: int, num_steps: int, seeds: Sequence[int]) -> str:
    """The share pushed down by `opob_safe`, and by each part of the mean, on what `opob_safe` trains on."""
    meter = _Meter()
    stability_rules.RULES["metered"] = stability_rules.Rule(
        algorithm=stability_rules.RULES["opob_safe"].algorithm, optimum=meter, about="opob_safe, metered"
    )
    Stack([Spec(rule="metered", lag=lag, seed=seed, lr=LR, num_steps=num_steps) for seed in seeds]).run()
    safe, *parts = (meter.down_R / (meter.down_R + meter.up_R)).tolist()
    shares = ", ".join(f"{a:.2f}: {share:.3f}" for a, share in zip(meter.alphas.tolist(), parts, strict=True))
    owners = ", ".join(f"a {name} {count / meter.num_groups:.0%}" for name, count in meter.dominating.items())
    return (
        f"lag {lag}: opob_safe pushes down {safe:.3f}; parts of the mean {shares}\n"
        f"lag {lag}: of {meter.num_groups} groups with a gradient one episode dominates: {owners}"
    )


def main() -> None:
    """Sweep, tune, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "stability_rewards.jsonl")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--pause", type=Path, default=Path("/tmp/quiet"), help="no stack begins while this file exists")
    parser.add_argument("--tune-alpha", action="store_true", help="print what scaled_mean is tuned to, instead of runs")
    parser.add_argument("--report", action="store_true", help="benchmarks/stability_rewards.md from --out")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.report:
        path = given.out.with_suffix(".md")
        path.write_text(stability_rewards_report.report(load_runs(given.out), len(list(cells()))))
        print(f"written: {path}")
    elif given.tune_alpha:
        for lag in (8, 32):
            print(tune_alpha(lag, 80, [100, 101]), flush=True)
    else:
        sweep(given.out, given.pause, given.seeds)


if __name__ == "__main__":
    main()
