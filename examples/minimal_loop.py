"""The whole loop in one process and on one page: environment -> group -> batch -> learner -> weights -> engine.

A model with random weights learns to answer in digits, on a laptop's CPU, in less than a minute:

    python examples/minimal_loop.py

The environment, the rollout, the token record and the learner are those of `agentrl train`. What this page replaces is
what makes a run asynchronous and safe: vLLM by `TorchEngine`, and the buffer, the journal and the services by a `for`
loop. So the loop is synchronous: each batch comes from the newest weights, and its lag is 0.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from agentrl import Action, Env, Episode, Message, StepResult, Task, user
from agentrl.chat.runners import TokenRunners
from agentrl.config import Config, WarmstartConfig
from agentrl.env import Split
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import settings_of
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Batch, Completion, FinishReason, Sampling, VersionSpan
from trainer import ranks
from trainer.learner import Learner
from trainer.warmstart.tiny_model import make_model, make_tokenizer, save

STEPS = 12
SHAPE = WarmstartConfig(vocab_size=300, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1)
CONFIG: dict[str, Any] = {
    "name": "minimal",
    "env": {"target": "examples/minimal_loop.py:Digits"},
    "rollout": {"groups_per_step": 4, "group_size": 8, "max_lag": 0, "max_context": 128, "max_turn_tokens": 8},
    "engine": {"request_seeds": True},
    "learner": {"lr": 1e-2},
}


# 1. The environment says what there is to solve and what an answer is worth. It sees messages, never tokens.
class Digits(Env):
    """One turn; the reward is the share of the answer's characters that are digits."""

    max_turns = 1

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """Endless for `train`, fixed for `test`."""
        numbers = range(64) if split == "test" else range(10**9)
        return (Task(id=f"{split}-{number}", prompt=f"Write digits, please ({number}).") for number in numbers)

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The prompt."""
        return [user(task.prompt)], {}

    async def step(self, action: Action) -> StepResult:
        """The first answer ends the episode."""
        return StepResult([], 0.0, True, False, {})

    async def score(self, episode: Episode) -> dict[str, float]:
        """Named rewards, once, at the end."""
        answer = episode.final_text
        return {"correct": sum(letter.isdigit() for letter in answer) / max(1, len(answer))}


# 2. The engine continues token ids and reports for each token its logprob and the version of the weights that chose it.
class TorchEngine:
    """An `Engine` that samples from a model in this process."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.version = 0

    @torch.no_grad()
    def _sample(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[list[int], list[float]]:
        random = torch.Generator().manual_seed(sampling.seed or 0)
        inputs, cache = torch.tensor([prompt_ids]), None
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < sampling.max_tokens and not (ids and ids[-1] in sampling.stop_token_ids):
            output = self.model(input_ids=inputs, past_key_values=cache, use_cache=True)
            log_p_V = output.logits[0, -1].log_softmax(dim=-1)
            chosen = int(torch.multinomial(log_p_V.exp(), 1, generator=random))
            ids.append(chosen)
            logprobs.append(float(log_p_V[chosen]))
            inputs, cache = torch.tensor([[chosen]]), output.past_key_values
        return ids, logprobs

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        """Continue `token_ids` until a stop token or the limit."""
        ids, logprobs = self._sample(token_ids, sampling)
        return Completion(
            token_ids=tuple(ids),
            behavior_logprobs=tuple(logprobs),  # of the distribution that was sampled: the learner's ratios need it
            version_spans=(VersionSpan(version=self.version, start=0, end=len(ids)),),
            finish_reason=FinishReason.STOP if ids[-1] in sampling.stop_token_ids else FinishReason.LENGTH,
        )

    def update_weights(self, learner: Learner) -> None:
        """Copy the learner's weights. In a run they travel through a folder or between GPUs, while requests run."""
        self.model.load_state_dict(learner.model.state_dict())
        self.version = learner.policy_version


def start(folder: Path) -> tuple[Config, TurnTokenizer, TorchEngine, Learner]:
    """Make a model with random weights and load it twice: into the engine and into the learner."""
    torch.set_num_threads(1)  # more only slow such a small model down
    config = Config.model_validate(CONFIG | {"model": {"path": str(folder / "model")}})
    tokenizer = make_tokenizer([task.prompt for task in Digits.tasks("test")], SHAPE.vocab_size)
    model = make_model(SHAPE, tokenizer, seed=config.seed)
    save(folder / "model", model, tokenizer)
    ranks.set_defaults(os.environ)  # the learner is one process here, and as many as there are GPUs in a run
    return config, TurnTokenizer.load(config.model.path), TorchEngine(model.eval()), Learner(config)


async def train(folder: Path, *, steps: int = STEPS) -> list[float]:
    """The loop. Returns the mean reward of each step."""
    config, tokenizer, engine, learner = start(folder)
    player = GroupPlayer(Digits, settings_of(config), TokenRunners(tokenizer))
    tasks = iter(Digits.tasks("train"))
    rewards = []
    for step in range(steps):
        # 3. A group is several episodes of one task. Its spread of rewards says which answers were better than others.
        groups = [
            await player.play_group(engine, step * config.rollout.groups_per_step + index, task, kind="train")
            for index, task in enumerate(islice(tasks, config.rollout.groups_per_step))
        ]
        # 4. A batch is for one version of the policy, and bounds the age of what is in it.
        batch = Batch(policy_version=learner.policy_version, max_lag=config.rollout.lag_bound, groups=tuple(groups))
        # 5. The learner checks the batch, weighs each trajectory by pi/mu, subtracts a baseline, and steps.
        output = learner.step(batch)
        # 6. The engine gets the new weights: what it samples from now on has the next version.
        engine.update_weights(learner)
        rewards.append(statistics.mean(one.reward for one in batch.trajectories()))
        print(f"step {step + 1}: reward {rewards[-1]:.2f}, version {output.policy_version}, ESS {output.ess_ratio:.2f}")
    return rewards


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(train(Path(folder)))
