"""A prompt that leaves no room for a turn is refused before an engine is needed, and the message says what to set."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from agentrl.config import RolloutConfig
from agentrl.env import ToolEnv, make
from agentrl.errors import ConfigError
from agentrl.rollouts.long_prompts import refuse_long_prompts
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.tools import tool
from agentrl.types import Message, Task, user


class Shop(ToolEnv):
    closed = 0

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        if task.id == "broken":
            raise RuntimeError("the shop is closed")
        return [Message(role="system", content="Buy cheaply. " * 20), user(task.prompt)], {}

    @tool
    async def price(self, item: str) -> float:
        """Price of an item in euros."""
        return 1.0

    async def close(self) -> None:
        Shop.closed += 1


TASKS = [Task(id=f"t{n}", prompt="Buy a pear. " * n) for n in (1, 50, 3, 60)]


async def refuse(tokenizer: TurnTokenizer, tasks: Sequence[Task] = TASKS, **rollout: Any) -> None:
    config = RolloutConfig(**rollout)
    await refuse_long_prompts(tasks, make_env=partial(make, Shop), tokenizer=tokenizer, config=config)


async def opening(tokenizer: TurnTokenizer) -> int:
    """Tokens of the longest prompt."""
    messages, _ = await Shop().reset(task=TASKS[3])
    return len(tokenizer.with_tool_format("auto").first_prompt(messages, Shop.tool_schemas()))


async def test_the_longest_prompt_is_measured_whole_and_named(tokenizer: TurnTokenizer) -> None:
    num_tokens, closed = await opening(tokenizer), Shop.closed
    with pytest.raises(ConfigError) as refused:
        await refuse(tokenizer, max_context=num_tokens + 10, max_turn_tokens=30)
    assert f"task t60: its prompt has {num_tokens} tokens, system message and tools included" in str(refused.value)
    assert f"Set rollout.max_context={num_tokens + 30} or more" in str(refused.value)
    assert "more)" not in str(refused.value)
    assert Shop.closed == closed + 1


async def test_how_many_others_are_too_long_is_said(tokenizer: TurnTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"\(as do those of 1 more\)"):
        await refuse(tokenizer, max_context=await opening(tokenizer) - 150, max_turn_tokens=30)


async def test_a_prompt_with_room_passes_and_a_first_turn_that_is_cut_is_a_warning(
    tokenizer: TurnTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    num_tokens = await opening(tokenizer)
    with caplog.at_level(logging.WARNING):
        await refuse(tokenizer, max_context=num_tokens + 30, max_turn_tokens=30)
        assert not caplog.records
        await refuse(tokenizer, max_context=num_tokens + 20, max_turn_tokens=30)
    assert f"raise rollout.max_context={num_tokens + 20} to {num_tokens + 30}" in caplog.text


async def test_a_reset_that_fails_is_left_to_the_episode(tokenizer: TurnTokenizer) -> None:
    await refuse(tokenizer, [Task(id="broken", prompt="?")], max_context=60, max_turn_tokens=30)
