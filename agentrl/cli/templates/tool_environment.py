"""PriceShop: a shop whose prices only a tool knows. `agentrl env new NAME` copies this file; change what you like.

agentrl env check price_shop.py:PriceShop      tests the environment
agentrl env play price_shop.py:PriceShop       lets you play the agent
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


@register("PriceShop-v0")
class PriceShop(ToolEnv):
    """Find the price of an item with a tool.

    One object is one episode; `self` holds whatever the episode needs.

    Example: `make("PriceShop-v0")`, or `env.target: price_shop.py:PriceShop` in a config.
    """

    max_turns = 4  # a turn is one message of the model
    # The reward that is trained on is the weighted sum of what score() returns.
    reward_weights: ClassVar = {"correct": 0.9, "short": 0.1}

    # ---- the tasks ---------------------------------------------------------------------------------------------

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """Endless for `train`, fixed for `test`. Rows of a file: see agentrl.data.rows.read_tasks."""
        if split == "test":
            return itertools.islice(_shops("test"), 64)
        return _shops(f"train-{seed}")

    # ---- the episode -------------------------------------------------------------------------------------------

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The first messages. What is opened here is closed in close()."""
        return [system("Look up the price. End with the price in \\boxed{}."), user(task.prompt)], {}

    @tool
    async def price(self, item: Annotated[str, "what to look up"], task: Task) -> str:
        """Price of an item in this shop."""
        # The model fills in `item`. `task` is private: agentrl fills it in by its type, and the schema leaves it out.
        prices = task.metadata["prices"]
        if item not in prices:
            raise ToolError(f"the shop has no {item!r}")  # the model reads this; any other exception is a failure
        return str(prices[item])

    async def score(self, episode: Episode) -> dict[str, float]:
        """Named rewards, once, at the end."""
        boxed = re.findall(r"\\boxed\{(.*?)\}", episode.final_text)
        correct = bool(boxed) and boxed[-1].strip() == episode.task.answer
        return {"correct": float(correct), "short": float(correct and len(episode.final_text) < 80)}

    # ---- demonstrations, for a warm start and for `agentrl env check` ------------------------------------------

    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message] | None:
        """The messages of a demonstrator: right with probability `skill`, else plausible and wrong."""
        rng = random.Random(f"{seed}/{task.id}")
        if rng.random() >= skill:
            return [_says(f"It costs \\boxed{{{rng.randint(10, 99)}}}.")]  # a guess, without looking it up
        call = ToolCall(id="call_0", name="price", arguments={"item": task.metadata["item"]})
        look = Message(role="assistant", content="", tool_calls=(call,))
        return [look, _says(f"It costs \\boxed{{{task.answer}}}.")]


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
