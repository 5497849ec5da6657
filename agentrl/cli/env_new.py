"""`agentrl env new`: writes an environment that works as it stands. The templates are the documentation of the API."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

from agentrl.errors import ConfigError

_TOOL = '''"""$name: a shop whose prices only a tool knows. Written by `agentrl env new`; change what you like.

agentrl env check $file:$name      does it keep its promises?
agentrl env play $file:$name       be the agent yourself
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar

from agentrl.env import Episode, Split, ToolEnv, register
from agentrl.tools import ToolError, tool
from agentrl.types import Message, Task, ToolCall, system, user

ITEMS = ("apple", "book", "chair", "drum", "egg", "fork", "glove", "hat", "inkpot", "jar", "kite", "lamp")


@register("$name-v0")
class $name(ToolEnv):
    """One object is one episode; `self` may hold whatever the episode needs."""

    max_turns = 4  # a turn is one message of the model
    # The reward that is trained on is the weighted sum of what score() returns.
    reward_weights: ClassVar = {"correct": 1.0, "short": 0.1}

    # ---- tasks: what there is to solve -------------------------------------------------------------------------

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """Endless for `train`, fixed for `test`. Rows of a file: see agentrl.data.rows.read_tasks."""
        if split == "test":
            return itertools.islice(_shops("test"), 64)
        return _shops(f"train-{seed}")

    # ---- the episode -------------------------------------------------------------------------------------------

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The first messages. What is opened here is given back in close()."""
        return [system("Look prices up. End with the price in \\\\boxed{}."), user(task.prompt)], {}

    @tool
    async def price(self, item: Annotated[str, "what to look up"], task: Task) -> str:
        """Price of an item in this shop."""
        # `item` is what the model fills in. `task` is private: filled in by its type, and not in the schema.
        prices = task.metadata["prices"]
        if item not in prices:
            raise ToolError(f"the shop has no {item!r}")  # the model reads this; any other exception is a failure
        return str(prices[item])

    async def score(self, episode: Episode) -> dict[str, float]:
        """Named rewards, once, at the end."""
        boxed = re.findall(r"\\\\boxed\\{(.*?)\\}", episode.final_text)
        correct = bool(boxed) and boxed[-1].strip() == episode.task.answer
        return {"correct": float(correct), "short": float(correct and len(episode.final_text) < 80)}

    # ---- an expert, for a warm start and for `agentrl env check` -----------------------------------------------

    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message] | None:
        """What a demonstrator says: with probability `skill` the right way, else a plausible wrong one."""
        rng = random.Random(f"{seed}/{task.id}")
        if rng.random() >= skill:
            return [_says(f"It costs \\\\boxed{{{rng.randint(10, 99)}}}.")]  # a guess, without looking it up
        call = ToolCall(id="call_0", name="price", arguments={"item": task.metadata["item"]})
        look = Message(role="assistant", content="", tool_calls=(call,))
        return [look, _says(f"It costs \\\\boxed{{{task.answer}}}.")]


def _says(text: str) -> Message:
    return Message(role="assistant", content=text)


def _shops(name: str) -> Iterator[Task]:
    rng = random.Random(name)
    for index in itertools.count():
        prices = {item: rng.randint(10, 99) for item in ITEMS}
        item = rng.choice(ITEMS)
        yield Task(
            id=f"{name}-{index}",
            prompt=f"Shop {name}-{index}: what does a {item} cost?",
            answer=str(prices[item]),  # never shown to the model
            metadata={"item": item, "prices": prices},
        )
'''

_DIALOGUE = '''"""$name: guess a number by what is answered. Written by `agentrl env new`; change what you like.

agentrl env check $file:$name      does it keep its promises?
agentrl env play $file:$name       be the agent yourself
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


@register("$name-v0")
class $name(Env):
    """One object is one episode; `self` may hold whatever the episode needs."""

    max_turns = 5  # a turn is one message of the model

    # ---- tasks: what there is to solve -------------------------------------------------------------------------

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """Endless for `train`, fixed for `test`. Rows of a file: see agentrl.data.rows.read_tasks."""
        if split == "test":
            return itertools.islice(_games("test"), 64)
        return _games(f"train-{seed}")

    # ---- the episode -------------------------------------------------------------------------------------------

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The first messages. What is opened here is given back in close()."""
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
        # Rewards of single turns go here; they are added up under the name "step".
        hint = "higher" if guess < self.secret else "lower"
        return StepResult([] if self.found else [user(hint)], 0.0, self.found, False, {})

    async def score(self, episode: Episode) -> dict[str, float]:
        """Named rewards, once, at the end."""
        return {"correct": float(self.found)}

    # ---- an expert, for a warm start and for `agentrl env check` -----------------------------------------------

    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message] | None:
        """What a demonstrator says: with probability `skill` the right way, else a plausible wrong one."""
        rng = random.Random(f"{seed}/{task.id}")
        if rng.random() >= skill:
            return [_says(str(rng.randint(1, HIGHEST))) for _ in range(cls.max_turns)]  # deaf to the answers
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
'''


def write_environment(name: str, folder: Path, *, tool: bool) -> tuple[Path, str]:
    """Write `folder/snake_case.py`; returns it and the class's name. Raises ConfigError, overwriting nothing."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[0-9]+", name)
    class_name = "".join(word[:1].upper() + word[1:] for word in words)
    if not re.fullmatch(r"[A-Za-z0-9_\- ]+", name) or not class_name.isidentifier() or keyword.iskeyword(class_name):
        raise ConfigError(f"{name!r} makes no class name; write letters and digits, such as RiverCrossing")
    path = folder / ("_".join(words).lower() + ".py")
    text = Template(_TOOL if tool else _DIALOGUE).substitute(name=class_name, file=path)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists already; nothing is overwritten: take another name") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path, class_name
