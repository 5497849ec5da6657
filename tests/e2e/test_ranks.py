"""Whole runs of learners, of several ranks too: orchestrator, wire, launcher, batches, publication and checkpoints are
real.

The engine says what a script tells it, so that runs can be compared: both see the same episodes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.config import Config, parse
from agentrl.engine.base import WeightUpdate
from agentrl.engine.checksum import checksum_of
from agentrl.report.metrics import MetricsLine, read
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training import launch
from agentrl.types import Completion, Sampling, WeightsRef
from tests.agentrl.training.whole_run import TOKEN, orchestrating
from tests.device import num_gpus

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(300)]

STEPS = 3


@dataclass(kw_only=True)
class SameWords(ScriptedEngine):
    """Answers a request with the same words in every run, and reads the weights that it receives."""

    checksums: list[str] = field(default_factory=list)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        hashed = hashlib.sha256(request_id.encode()).digest()
        words = ["yes"] if hashed[0] % 2 else ["no"] * (1 + hashed[1] % 7)
        return self.completion(" ".join(words), max_tokens=sampling.max_tokens)

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        assert ref.path is not None
        tensors = load_file(Path(ref.path) / "model.safetensors")
        self.checksums.append(checksum_of(tensors.items()))
        assert self.checksums[-1] == ref.checksum
        return await super().update_weights(ref)


@dataclass(frozen=True, kw_only=True)
class Made:
    """Results of a run."""

    checksums: list[str]
    steps: list[MetricsLine]
    log: str
    states: list[str]
    final: dict[str, Tensor]


async def made(
    folder: Path,
    model: Path,
    tokenizer: TurnTokenizer,
    *,
    engine: SameWords | None = None,
    lag: int = 0,
    **learner: Any,
) -> Made:
    """Make a whole run; a synchronous one trains the same groups at the same versions as any other."""
    config = settings(folder, model, lag=lag, **learner)
    engine = engine or SameWords(tokenizer=tokenizer, script=[], logprob=-5.9)
    async with orchestrating(config, engine, tokenizer) as (orchestrator, url), asyncio.timeout(240):
        run = folder / config.name
        with launch.weights_folder(run) as weights:
            async with (
                launch.learner_process(
                    config,
                    config_path=run / "config.json",
                    orchestrator_url=url,
                    weights_dir=weights,
                    run_dir=run,
                    token=TOKEN,
                ) as part,
                launch.watching(part),
            ):
                await orchestrator.run()
                assert await part.wait() == 0, part.log_tail()
    return Made(
        checksums=engine.checksums,
        steps=[line for line in read(run / "metrics.jsonl") if line.kind == "step"],
        log=part.log_path.read_text(),
        states=sorted(path.name for path in (run / "checkpoints/states").glob("v*")),
        final=load_file(run / "checkpoints/final/model.safetensors"),
    )


def settings(folder: Path, model: Path, *, lag: int = 0, **learner: Any) -> Config:
    return parse(
        {
            "name": "run",
            "out_dir": str(folder),
            "env": {"target": "unused:Unused"},
            "model": {"path": str(model)},
            "engine": {"url": "http://127.0.0.1:1"},  # a script is the engine: no GPU is kept for one
            "rollout": {"groups_per_step": 3, "group_size": 4, "max_lag": lag, "max_retries": 0},
            "learner": {"lr": 1e-3, "checkpoint_every": 2, "save_every": 0, **learner},
            "train": {"steps": STEPS, "stall_timeout_s": 60},
            "eval": {"num_tasks": 1, "samples_per_task": 1},
        },
        source="test",
    )


@pytest.mark.skipif(num_gpus() == 1, reason="two ranks need two GPUs where there are any")
async def test_two_ranks_that_a_hostfile_names_make_the_run_that_one_rank_makes(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    tokenizer = TurnTokenizer.load(str(tiny_model_dir))
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=2\n")
    one = await made(tmp_path / "one", tiny_model_dir, tokenizer)
    two = await made(tmp_path / "two", tiny_model_dir, tokenizer, num_ranks=2, zero_stage=2, hostfile=str(hostfile))
    assert "dist_world_size=2" in two.log
    assert [line.step for line in two.steps] == [1, 2, 3]
    for mine, theirs in zip(two.steps, one.steps, strict=True):
        for name in ("rollout/reward_mean", "learner/ess_ratio", "learner/grad_norm"):
            assert mine.values[name] == pytest.approx(theirs.values[name], rel=1e-5), name
        assert mine.values["learner/lag_max"] == 0
    start = load_file(tiny_model_dir / "model.safetensors")
    moved, apart = distance(two.final, start), distance(two.final, one.final)
    assert moved > 0.1 and apart < 1e-4 * moved
    assert two.checksums[0] == one.checksums[0] and len(set(two.checksums)) == STEPS + 1
    assert two.checksums[-1] == checksum_of(two.final.items())
    assert two.states == one.states == ["v2", "v3"]
    assert not (tmp_path / "two/run/learner.token").exists()


@dataclass(kw_only=True)
class Slow(SameWords):
    """Takes its weights slowly, like a large model's from a folder."""

    seconds: float = 0.5

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        await asyncio.sleep(self.seconds)
        return await super().update_weights(ref)


async def test_with_lag_the_learner_computes_while_the_engine_takes_its_weights(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    tokenizer = TurnTokenizer.load(str(tiny_model_dir))
    engine = Slow(tokenizer=tokenizer, script=[], logprob=-5.9)
    run = await made(tmp_path, tiny_model_dir, tokenizer, engine=engine, lag=1, checkpoint_every=0)
    assert [line.step for line in run.steps] == [1, 2, 3]
    assert run.checksums[-1] == checksum_of(run.final.items()) and len(set(run.checksums)) == STEPS + 1
    assert all(line.values["learner/lag_max"] <= 1 for line in run.steps)
    assert all(line.values["learner/publish_beside_s"] > 0 for line in run.steps)


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return float(torch.stack([(first[name] - second[name]).norm() for name in first.keys() & second.keys()]).norm())
