"""Compares three learner steps under many ways of dividing the work with the same steps under plain settings.

    python -m tests.trainer.equality MODEL [--methods NAME ...]       the table of docs/learner.md
    torchrun ... --module tests.trainer.equality MODEL --out FILE --cases JSON
                                       what test_equality.py runs on two ranks: rank 0 saves the outcomes

A setting's outcome is the statistics of every trajectory at every step, the gradient norms, and the weights in the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM

from agentrl.testing import group, with_members
from agentrl.types import Batch, StepOutput, TrajectoryGroup
from tests.device import without_gpus
from tests.trainer.trainer_builders import (
    batch,
    config,
    divide_small_weights,
    episode,
    mixed_groups,
    whole_weights,
    with_steady_updates,
)
from trainer import packing, ranks
from trainer.gradient import methods
from trainer.learner import Learner
from trainer.process_end import end_process
from trainer.step_stats import GroupStats

ROOT = Path(__file__).parents[2]
LEARNER = {"lr": 1e-4, "grad_clip": 0.5, "weight_decay": 0.01}
Share = Callable[..., list[TrajectoryGroup]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to make the same steps."""

    dtype: str = "float32"
    zero_stage: int = 0
    offload: bool = False
    checkpointing: bool = False
    method: str = "auto"
    pack_tokens: int = 8192
    algorithm: dict[str, Any] = field(default_factory=lambda: {"preset": "vcpo"})
    model: dict[str, Any] = field(default_factory=dict)  # further keys of the section
    split: str = "own"  # which rank gets which groups: see SHARES
    sequence_parallel: int = 1
    num_groups: int = 3
    num_steps: int = 3
    longest: int | None = None  # tokens of the one long trajectory that the batch then has
    mlp_tiles: int = 1
    offload_activations: bool = False
    streamed: bool = False  # the learner gets one group after the other
    is_poisoned: bool = False  # the second step's batch holds a NaN, in a group of one rank


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a setting. Rows are steps; columns are trajectories by id, or groups by their first id."""

    log_weight: torch.Tensor
    score_norm: torch.Tensor
    advantage: torch.Tensor
    kl: torch.Tensor
    baseline: torch.Tensor  # minus the group's mean reward
    rho: torch.Tensor
    grad_norm: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Differences of two outcomes: the largest over steps, trajectories and groups."""

    log_weight: float
    score_norm: float  # relative
    advantage: float
    kl: float  # relative to 1 + KL
    baseline: float
    rho: float
    grad_norm: float  # relative
    update: float  # |difference of the weights| / |update|, as vectors
    weight: float  # of one weight


# Which groups a rank gets: as the learner does it, in reverse order of ranks, alternating, or all on the first rank.
SHARES: dict[str, Share] = {
    "own": packing.share_of_rank,
    "reversed": lambda groups, *, rank, num_ranks, loads=None: packing.share_of_rank(
        groups, rank=num_ranks - 1 - rank, num_ranks=num_ranks
    ),
    "dealt": lambda groups, *, rank, num_ranks, loads=None: list(groups[rank::num_ranks]),
    "all on one": lambda groups, *, rank, num_ranks, loads=None: list(groups) if rank == 0 else [],
}


class Watched(Learner):
    """Keeps the statistics of every step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stats: list[list[GroupStats]] = []

    def _log_step(self, groups: list[GroupStats], *numbers: Any) -> None:
        super()._log_step(groups, *numbers)
        self.stats.append(sorted(groups, key=lambda group: group.trajectories[0].id))


def _rollout(setting: Setting) -> dict[str, Any]:
    return {"groups_per_step": setting.num_groups, "group_size": 4, "max_lag": 0} if setting.streamed else {}


def _stepped(learner: Learner, whole: Batch, setting: Setting) -> StepOutput:
    if not setting.streamed:
        return learner.step(whole)
    *early, last = whole.groups[::-1]  # groups finish in any order
    parts = [replace(whole, groups=(one,), num_missing=len(early) - number) for number, one in enumerate(early)]
    learner.add(parts[0])
    learner.drop_parts()  # leaves no trace
    for part in parts:
        learner.add(part)
        learner.logprobs(range(8))  # as for an engine that was restarted meanwhile
    return learner.step(replace(whole, groups=(last,)))


def outcome(model_dir: Path, setting: Setting) -> Outcome:
    """The outcome of a setting. Every rank must call it."""
    methods.share_of_rank = SHARES[setting.split]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32").eval()
    groups = mixed_groups(model)[: setting.num_groups] if setting.longest is None else [_long_group(setting.longest)]
    settings = {
        **LEARNER,
        "zero_stage": setting.zero_stage,
        "offload_optimizer": setting.offload,
        "gradient_checkpointing": setting.checkpointing,
        "gradient": setting.method,
        "pack_tokens": setting.pack_tokens,
        "sequence_parallel": setting.sequence_parallel,
        "mlp_tiles": setting.mlp_tiles,
        "offload_activations": setting.offload_activations,
        "num_ranks": setting.sequence_parallel,  # more only matters to who starts them
        "stream_groups": setting.streamed,
    }
    algorithm = {"rho_base": 1.0, **setting.algorithm}
    model_section = {"path": str(model_dir), "dtype": setting.dtype, **setting.model}
    learner = with_steady_updates(
        Watched(
            config(model_dir, model=model_section, learner=settings, algorithm=algorithm, rollout=_rollout(setting))
        )
    )
    before = whole_weights(learner.model)
    batches = [batch(groups, version=version) for version in range(setting.num_steps)]
    if setting.is_poisoned:
        batches[1] = batch(_poisoned(groups), version=1)
    metrics = [_stepped(learner, one, setting).metrics for one in batches]
    assert metrics[-1]["learner/skipped_steps"] == setting.is_poisoned
    made = [version for version in range(setting.num_steps) if "learner/grad_norm" in metrics[version]]
    metrics, learner.stats = [metrics[version] for version in made], [learner.stats[version] for version in made]
    members = [[one for group in step for one in group.trajectories] for step in learner.stats]

    def table(name: str) -> torch.Tensor:
        return torch.tensor([[getattr(one, name) for one in step] for step in members], dtype=torch.float64)

    return Outcome(
        log_weight=table("log_weight"),
        score_norm=table("score_norm"),
        advantage=table("advantage"),
        kl=table("kl_sum"),
        baseline=torch.tensor([[group.baseline_minus_mean for group in step] for step in learner.stats]),
        rho=torch.tensor([step["learner/ess_ratio"] for step in metrics]),
        grad_norm=torch.tensor([step["learner/grad_norm"] for step in metrics]),
        before=before,
        after=whole_weights(learner.model),
    )


def _long_group(longest: int) -> TrajectoryGroup:
    """A trajectory of `longest` tokens whose first and last actions are `longest` apart, and a short one."""
    long = episode("long", reward=1.0, shape=((20, 200), (longest - 820, 400), (100, 100)))
    return group(0, [long, episode("short", reward=0.0, shape=((30, 60),), seed=1)])


def _poisoned(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    first, *others = groups
    broken = replace(first.trajectories[0], reward=math.nan)
    return [with_members(first, (broken, *first.trajectories[1:])), *others]


def difference(one: Outcome, reference: Outcome) -> Difference:
    def absolute(name: str) -> float:
        return float((getattr(one, name) - getattr(reference, name)).abs().max())

    def relative(name: str, floor: float = 1e-12) -> float:
        theirs = getattr(reference, name)
        return float(((getattr(one, name) - theirs).abs() / theirs.abs().clamp(min=floor)).max())

    moved = (reference.after - reference.before).norm()
    return Difference(
        log_weight=absolute("log_weight"),
        score_norm=relative("score_norm"),
        advantage=absolute("advantage"),
        kl=relative("kl", floor=1.0),
        baseline=absolute("baseline"),
        rho=absolute("rho"),
        grad_norm=relative("grad_norm"),
        update=float((one.after - reference.after).norm() / moved),
        weight=absolute("after"),
    )


def worst(differences: Sequence[Difference]) -> Difference:
    rows = [asdict(one) for one in differences]
    return Difference(**{name: max(row[name] for row in rows) for name in rows[0]})


METHODS = {"one_pass": "vcpo", "one_pass_sharded": "vcpo", "two_pass": "vcpo", "plain": "grpo"}
"""Each method, and the preset with which it is compared with `one_pass` on one rank in stage 0."""


def grid(methods: Sequence[str]) -> Iterator[Setting]:
    for dtype in ("float32", "bfloat16"):
        for method in methods:
            for zero_stage in range(4):
                for is_lean in (False, True):
                    yield Setting(
                        dtype=dtype,
                        method=method,
                        algorithm={"preset": METHODS[method]},
                        zero_stage=zero_stage,
                        offload=is_lean and zero_stage > 0,
                        checkpointing=is_lean,
                    )


def reference_of(setting: Setting, dtype: str) -> Setting:
    """The same steps on one rank in stage 0 by `one_pass`."""
    return Setting(dtype=dtype, method="one_pass", algorithm=setting.algorithm)


def on_two_ranks(model_dir: Path, settings: Sequence[Setting], out: Path, *, timeout_s: float) -> list[Outcome]:
    """The outcomes on two ranks, from one pair of processes, which has ended when this returns or raises."""
    cases = json.dumps([asdict(setting) for setting in settings])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "--module", "tests.trainer.equality", str(model_dir), "--out", str(out), "--cases", cases]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | without_gpus(), start_new_session=True) as process:
        try:
            assert process.wait(timeout_s) == 0
        finally:
            process.terminate()  # the launcher ends its ranks
    loaded: list[Outcome] = [Outcome(**one) for one in torch.load(out)]
    return loaded


def print_table(model_dir: Path, methods: Sequence[str]) -> None:
    settings = list(grid(methods))
    with tempfile.TemporaryDirectory() as folder:
        two = on_two_ranks(model_dir, settings, Path(folder) / "out.pt", timeout_s=900)
    one = [outcome(model_dir, setting) for setting in settings]
    found = [(s, 1, o) for s, o in zip(settings, one, strict=True)]
    found += [(s, 2, o) for s, o in zip(settings, two, strict=True)]
    made = {str(reference_of(s, s.dtype)): s for s in settings}
    references = {name: outcome(model_dir, reference_of(s, s.dtype)) for name, s in made.items()}
    names = list(Difference.__annotations__)
    sys.stdout.write("| against | dtype | method | ranks | ZeRO | " + " | ".join(names) + " |\n")
    for base, dtype in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")):
        for method in methods:
            for number in (1, 2):
                for stages in ((0,), (1, 2, 3)):
                    rows = [
                        difference(o, references[str(reference_of(s, base))])
                        for s, ranks_used, o in found
                        if (s.dtype, s.method, ranks_used) == (dtype, method, number) and s.zero_stage in stages
                    ]
                    values = " | ".join(f"{value:.1e}" for value in asdict(worst(rows)).values())
                    sys.stdout.write(
                        f"| {base} | {dtype} | {method} | {number} | {stages[0]} to {stages[-1]} | {values} |\n"
                    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    divide_small_weights()
    if arguments.cases is None:
        return print_table(arguments.model_dir, arguments.methods)
    found = [outcome(arguments.model_dir, Setting(**case)) for case in json.loads(arguments.cases)]
    if distributed.get_rank() == 0:
        torch.save([{name: getattr(one, name) for name in Outcome.__annotations__} for one in found], arguments.out)
    distributed.barrier()


if __name__ == "__main__":
    ranks.set_defaults(os.environ)
    main()
    end_process()
