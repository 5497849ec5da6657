"""GuessNumber: find a number from hints. `agentrl env new NAME --no-tool` copies this file; change what you like.

agentrl env check guess_number.py:GuessNumber      tests the environment
agentrl env play guess_number.py:GuessNumber       lets you play the agent
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agentrl.env import Action, Env, Episode, Split, StepResult, register
from agentrl.types import Message, Task, user

HIGHEST = 31


@register("GuessNumber-v0")
class GuessNumber(Env):
    """Find a number; each guess is answered with `higher` or `lower`.

    One object is one episode; `self` holds whatever the episode needs.

    Example: `make("GuessNumber-v0")`, or `env.target: guess_number.py:GuessNumber` in a config.
    """

    max_turns = 5  # a turn is one message of the model

    # ---- the tasks ---------------------------------------------------------------------------------------------

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """Endless for `train`, fixed for `test`. Rows of a file: see agentrl.data.rows.read_tasks."""
        if split == "test":
            return itertools.islice(_games("test"), 64)
        return _games(f"train-{seed}")

    # ---- the episode -------------------------------------------------------------------------------------------

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The first messages. What is opened here is closed in close()."""
        self.secret = int(task.answer or "0")
        self.found = False
        return [user(task.prompt)], {}

    async def step(self, action: Action) -> StepResult:
        """Answer one message of the model: (observation, reward, terminated, truncated, info), as in Gymnasium."""
        numbers = re.findall(r"[0-9]+", action.message.content)
        if not numbers:
            return StepResult([user(f"Say a number from 1 to {HIGHEST}.")], 0.0, False, False, {})
        guess = int(numbers[-1][:9])
        self.found = guess == self.secret
        # The reward of a single turn goes here; their sum has the name "step".
        hint = "higher" if guess < self.secret else "lower"
        return StepResult([] if self.found else [user(hint)], 0.0, self.found, False, {})

    async def score(self, episode: Episode) -> dict[str, float]:
        """Named rewards, once, at the end."""
        return {"correct": float(self.found)}

    # ---- demonstrations, for a warm start and for `agentrl env check` ------------------------------------------

    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message] | None:
        """The messages of a demonstrator: right with probability `skill`, else plausible and wrong."""
        rng = random.Random(f"{seed}/{task.id}")
        if rng.random() >= skill:
            return [_says(str(rng.randint(1, HIGHEST))) for _ in range(cls.max_turns)]  # ignores the hints
        secret, low, high = int(task.answer or "0"), 1, HIGHEST
        guesses = [(low + high) // 2]
        while guesses[-1] != secret:
            low, high = (guesses[-1] + 1, high) if guesses[-1] < secret else (low, guesses[-1] - 1)
            guesses.append((low + high) // 2)
        return [_says(str(guess)) for guess in guesses]


def _says(text: str) -> Message:
    return Message(role="assistant", content=text)


def _games(name: str) -> Iterator[Task]:
    rng = random.Random(name)
    for index in itertools.count():
        yield Task(
            id=f"{name}-{index}",
            prompt=f"Game {name}-{index}: find my number from 1 to {HIGHEST}.",
            answer=str(rng.randint(1, HIGHEST)),  # never shown to the model
        )
