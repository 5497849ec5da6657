"""At max_lag 0 a run is the synchronous loop to the last bit: the same groups, the same updates, the same weights.

The loop is that of examples/minimal_loop.py: one group after the other, a step, the weights. The run is the real one:
orchestrator, buffer, journal and learner API, with requests that end in any order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from agentrl.chat.runners import TokenRunners
from agentrl.config import Config, parse
from agentrl.data.source import TaskSource
from agentrl.engine.base import Receivers, WeightUpdate
from agentrl.env import Episode
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import settings_of
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training import learner_api as api
from agentrl.types import Batch, Completion, Probe, Sampling, TrajectoryGroup, TransferInit, WeightsRef
from examples.minimal_loop import Digits, TorchEngine
from tests.agentrl.training.whole_run import TOKEN, orchestrating
from trainer.learner import Learner

STEPS = 3


class Even(Digits):
    """Rewards an even number of letters: some groups of four have equal rewards, and are replaced in their step."""

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(len(episode.final_text) % 2 == 0)}


@dataclass
class Served:
    """The example's engine as that of a run: requests take any time, and the learner is at hand for its weights."""

    engine: TorchEngine
    learner: Learner
    wants_weights: bool = False
    late: random.Random = field(default_factory=lambda: random.Random(7))

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        await asyncio.sleep(self.late.random() / 100)
        return await self.engine.generate(token_ids, sampling, request_id=request_id, session_id=session_id)

    async def receivers(self, policy_version: int) -> Receivers:
        return Receivers(engines=("here",))

    async def init_transfer(self, init: TransferInit) -> None:
        raise AssertionError("nothing is transferred")

    async def pause(self) -> None:
        raise AssertionError("nothing is unfinished when a step begins")

    async def sleep(self) -> None:
        raise AssertionError("it has no memory to give")

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        assert ref.policy_version == self.learner.policy_version
        self.engine.update_weights(self.learner)
        return WeightUpdate(gap_s=1e-9, num_bytes=0, parity=None)

    def metrics(self) -> dict[str, float]:
        return {}


@dataclass
class Side:
    """One of the two: a learner and an engine that begin with the same weights."""

    config: Config
    tokenizer: TurnTokenizer
    learner: Learner
    engine: TorchEngine
    batches: list[tuple[TrajectoryGroup, ...]] = field(default_factory=list)

    @classmethod
    def start(cls, out: Path, model: Path, policy: Any) -> Side:
        config = parse(
            {
                "name": "t",
                "out_dir": str(out),
                "env": {"target": "unused:Unused"},
                "model": {"path": str(model)},
                "rollout": {"groups_per_step": 2, "group_size": 4, "max_lag": 0, "max_context": 128}
                | {"max_turn_tokens": 8, "tool_output_tokens": 16},
                "engine": {"request_seeds": True},
                "learner": {"lr": 1e-2},
                "train": {"steps": STEPS},
                "eval": {"num_tasks": 1, "samples_per_task": 1},
            },
            source="test",
        )
        return cls(config, TurnTokenizer.load(str(model)), Learner(config), TorchEngine(policy))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.learner.model.state_dict().items()}

    async def loop(self) -> int:
        """The synchronous loop. Returns the number of groups that it played."""
        player = GroupPlayer(Even, settings_of(self.config), TokenRunners(self.tokenizer))
        tasks, number = TaskSource(Even, self.config.env, seed=self.config.seed), 0
        for version in range(STEPS):
            groups: list[TrajectoryGroup] = []
            while len(groups) < self.config.rollout.groups_per_step:
                group = await player.play_group(self.engine, number, tasks.next(), kind="train")
                groups += [group] if len(set(group.rewards_G)) > 1 else []
                number += 1
            batch = Batch(policy_version=version, max_lag=0, groups=tuple(groups))
            self.learner.step(batch)
            self.engine.update_weights(self.learner)
            self.batches.append(batch.groups)
        return number

    async def run(self) -> None:
        """The run, with a learner that does what the learner's process does."""
        served = Served(self.engine, self.learner)
        async with orchestrating(self.config, served, self.tokenizer, env_class=Even) as (orchestrator, url):
            learning = asyncio.create_task(self._learn(url))
            async with asyncio.timeout(120):
                assert (await orchestrator.run()).num_steps == STEPS
                await learning

    async def _learn(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}", api.LEARNER_HEADER: "learner"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
            while True:
                version, probe = self.learner.policy_version, Probe(token_ids=(1, 2), logprobs=(-1.0,))
                ref = WeightsRef(policy_version=version, num_bytes=0, update_info={}, checksum="", probe=probe)
                (await http.post(api.WEIGHTS, content=api.encode(ref))).raise_for_status()
                while (reply := await http.get(api.BATCH, params={"policy_version": version})).status_code == 204:
                    pass
                if reply.status_code == 410:
                    (await http.post(api.FINISHED)).raise_for_status()
                    return
                batch = api.decode(reply.content, Batch)
                self.batches.append(batch.groups)
                output = await asyncio.to_thread(self.learner.step, batch)
                (await http.post(api.STEP, content=api.encode(output))).raise_for_status()


def tokens(batches: list[tuple[TrajectoryGroup, ...]]) -> list[Any]:
    """What was trained: of each batch the groups, and of each episode tokens, log-probabilities and reward."""
    return [
        [
            (group.group_id, group.task.id, [(one.turns, one.reward, one.policy_version) for one in group.trajectories])
            for group in batch
        ]
        for batch in batches
    ]


@pytest.mark.slow  # two learners
async def test_without_lag_a_run_makes_the_weights_of_the_synchronous_loop_bit_for_bit(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    from transformers import AutoModelForCausalLM

    sides = [
        Side.start(
            tmp_path, tiny_model_dir, AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype="float32").eval()
        )
        for _ in range(2)
    ]
    before, (loop, run) = sides[0].weights(), sides
    assert await loop.loop() > STEPS * 2, "no group was replaced"
    await run.run()
    assert tokens(loop.batches) == tokens(run.batches)
    after, theirs = loop.weights(), run.weights()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert [name for name in after if not torch.equal(after[name], theirs[name])] == []
