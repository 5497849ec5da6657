"""Environments for worker processes, and an engine whose answers depend on the prompt and the seed alone."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from openai import AsyncOpenAI

from agentrl.env import Action, Env, Episode, StepResult
from agentrl.env.agent_env import AgentEnv, Endpoint
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Completion, Message, Sampling, Task, user

WORDS = ("yes", "no", "print", "name", "answer")
NUM_TURNS = 3
NUM_CROWDED = 4
PLACE = "AGENTRL_TEST_PLACE"
"""Names a folder in which an environment leaves notes for the test."""


class Words(Env):
    """Three turns, whose answers are repeated to the model. Rewards answers with an even number of letters in all, and
    the share of its group that said more."""

    reward_weights: ClassVar = {"correct": 1.0, "brief": 0.5}

    @classmethod
    def tasks(cls, split: str, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return [Task(id=f"{split}-{i}", prompt=f"Say word {i}.", metadata={"number": i}) for i in range(40)]

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        self.num_turns = 0
        return [user(task.prompt)], {}

    async def step(self, action: Action) -> StepResult:
        self.num_turns += 1
        await asyncio.sleep(0.01)
        text = action.message.content
        return StepResult([user(f"You said {text}.")], 0.0, self.num_turns == NUM_TURNS, False, {})

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(len(said_in(episode)) % 2 == 0)}

    async def score_group(self, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        lengths = [len(said_in(episode)) for episode in episodes]
        return [{"brief": sum(other > length for other in lengths) / len(lengths)} for length in lengths]


def said_in(episode: Episode) -> str:
    return "".join(message.content for message in episode.messages if message.role == "assistant")


class Short(Words):
    """One turn."""

    async def step(self, action: Action) -> StepResult:
        return StepResult([], 0.0, True, False, {})


class Blocking(Words):
    """The first process that plays it blocks its event loop for ever, once."""

    async def step(self, action: Action) -> StepResult:
        note = Path(os.environ[PLACE], "blocked")
        try:
            note.touch(exist_ok=False)
        except FileExistsError:
            return await super().step(action)
        while True:
            time.sleep(0.05)


class Slow(Words):
    """Each turn takes a while, so that a worker can be killed in the middle of its groups."""

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(0.3)
        return await super().step(action)


class Crowded(Words):
    """The first steps of its first four episodes compute one after the other, in one pass of the event loop."""

    waiting: ClassVar[int] = 0
    all_here: ClassVar[asyncio.Event] = asyncio.Event()

    async def step(self, action: Action) -> StepResult:
        if Crowded.waiting < NUM_CROWDED:
            Crowded.waiting += 1
            if Crowded.waiting == NUM_CROWDED:
                Crowded.all_here.set()
            await Crowded.all_here.wait()
            time.sleep(3.0)
        return await super().step(action)


class Overtaken(Words):
    """The second turns of two training groups wait until the test has seen an update of the weights."""

    async def step(self, action: Action) -> StepResult:
        if self.num_turns == 1 and self._is_held_up():
            while not Path(os.environ[PLACE], "updated").exists():
                await asyncio.sleep(0.05)
        return await super().step(action)

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        self.task_id = task.id
        return await super().reset(task=task, seed=seed)

    def _is_held_up(self) -> bool:
        """Whether its task is one of the first two of training that asked, in whichever process."""
        if not self.task_id.startswith("train"):
            return False
        for slot in (Path(os.environ[PLACE], f"slot-{number}") for number in range(2)):
            with suppress(FileExistsError):
                slot.symlink_to(self.task_id)  # at once with its contents
            if os.readlink(slot) == self.task_id:
                return True
        return False


class Calculating(AgentEnv):
    """An agent asks the model once. Its answer counts if the sandbox computes what it should."""

    @classmethod
    def tasks(cls, split: str, *, data: str | None = None, seed: int = 0) -> list[Task]:
        return [Task(id=f"{split}-{i}", prompt=f"Compute {i} * {i}.", metadata={"number": i}) for i in range(8)]

    async def run(self, *, task: Task, endpoint: Endpoint) -> None:
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            asked: Any = [{"role": "user", "content": task.prompt}]
            answer = await client.chat.completions.create(model=endpoint.model, messages=asked)
        number = task.metadata["number"]
        async with self.sandbox.session() as session:
            computed = (await session.exec(f"print({number} * {number})")).to_text().strip()
        self.is_right = answer.choices[0].message.content == "yes" and computed == str(number**2)

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(self.is_right)}


class SeededWords(ScriptedEngine):
    """Says the word that prompt and seed choose."""

    def __init__(self, tokenizer: TurnTokenizer, **options: Any) -> None:
        super().__init__(tokenizer=tokenizer, script=[], **options)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        assert sampling.seed is not None
        digest = hashlib.sha256(f"{list(token_ids)} {sampling.seed}".encode()).digest()
        await asyncio.sleep(self.latency_s * digest[1] / 256)
        return self.completion(WORDS[digest[0] % len(WORDS)], max_tokens=sampling.max_tokens)
