"""Formats of tool calls: what a model is told, where it stops, what runs, and how the answer is put behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import RolloutConfig
from agentrl.env import Env, Episode, ToolEnv
from agentrl.errors import ConfigError
from agentrl.testing import ScriptedEngine, call
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.tokens.tool_calls import FENCE, RETOOL, CodeBlock, format_code, parse_code
from agentrl.tools import tool
from agentrl.types import FinishReason, Message, StopReason, Task, ToolCall, Trajectory, user
from tests.agentrl.rollouts.playing import play_one
from tests.agentrl.tokens.families import QWEN25, write_family

TOOLS = [{"type": "function", "function": {"name": "python", "description": "Run it.",
          "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}}}]  # fmt: skip
LIMITS = RolloutConfig(max_context=2000, max_turn_tokens=300, tool_output_tokens=160)


class Calculator(ToolEnv):
    """Says what the code is."""

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    @tool
    async def python(self, code: str) -> str:
        """Run Python."""
        return f"ran {code!r}"

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float("\\boxed{7}" in episode.final_text)}


@pytest.fixture
def play(tokenizer: TurnTokenizer) -> Callable[..., Any]:
    async def run(script: list[str], env: Env | None = None, **changes: Any) -> Trajectory:
        engine = ScriptedEngine(tokenizer=tokenizer, script=script)
        parts: dict[str, Any] = {"engine": engine, "tokenizer": tokenizer, "config": LIMITS.model_copy(update=changes)}
        task = Task(id="t", prompt="What?")
        (episode,) = await play_one(env or Calculator(), task, **parts)
        return episode

    return run


code = st.text(st.characters(exclude_categories=("Cs",)), max_size=40).filter(lambda t: "```" not in t and "<" not in t)


@settings(max_examples=60, deadline=None)
@given(
    content=st.text("ab .\n", max_size=10).map(lambda t: t.rstrip("\n")),
    text=code,
    block=st.sampled_from([FENCE, RETOOL]),
)
def test_parsing_code_inverts_formatting(content: str, text: str, block: CodeBlock) -> None:
    calls = (ToolCall(id="call_0", name="python", arguments={"code": text}),)
    parsed = parse_code(format_code(content, calls, block), block, name="python", argument="code")
    assert (parsed.content, parsed.tool_calls, parsed.errors) == (content, calls, ())


@pytest.mark.parametrize(
    ("block", "text", "wanted"),
    [
        (FENCE, "so ```python\nprint(1)\n```\n", "print(1)"),
        (FENCE, "```py\nprint('```')\n```", "print('```')"),
        (FENCE, "```python\na\n```\nand ```python\nb\n```\n", "a"),
        (RETOOL, "<code>\nprint(1)\n</code>", "print(1)"),
        (RETOOL, "<code>print(1)</code>", "print(1)"),
        (RETOOL, "<think>x <code>\n```python\nif a:\n    b\n```\n</code>", "if a:\n    b"),
    ],
)
def test_the_first_whole_block_runs_as_written(block: CodeBlock, text: str, wanted: str) -> None:
    assert parse_code(text, block, name="f", argument="code").tool_calls[0].arguments == {"code": wanted}


@pytest.mark.parametrize(
    ("block", "text", "reason"),
    [
        (FENCE, "```python\nprint(1)", "not closed"),
        (FENCE, "```\nprint(1)\n```\n", "no code to run"),
        (FENCE, '```python\ns = "a```\n', "not closed"),
        (RETOOL, "<code>print(1)", "not closed"),
        (RETOOL, "print(1)</code>", "no code to run"),
    ],
)
def test_a_malformed_block_is_reported_and_not_run(block: CodeBlock, text: str, reason: str) -> None:
    parsed = parse_code(text, block, name="f", argument="code")
    assert parsed.tool_calls == () and reason in parsed.errors[0] and parsed.content == text


def test_text_without_code_is_neither_call_nor_error() -> None:
    assert parse_code("The answer is 7.", FENCE, name="f", argument="code").errors == ()


@pytest.mark.parametrize(
    ("tool_format", "block", "answer"),
    [
        ("fences", "```python\nprint(1)\n```\n", "\nCode execution result: ran 'print(1)'\n"),
        ("retool", "<code>\n```python\nprint(1)\n```\n</code>", "\n<interpreter>\nran 'print(1)'\n</interpreter>\n"),
    ],
)
async def test_code_is_run_in_the_middle_of_a_turn(
    play: Callable[..., Any], tokenizer: TurnTokenizer, tool_format: str, block: str, answer: str
) -> None:
    episode = await play([f"Let me see.\n{block}never said", "So \\boxed{7}"], tool_format=tool_format)
    first, second = episode.turns
    assert tokenizer.decode(first.completion.token_ids) == f"Let me see.\n{block}"
    assert first.completion.finish_reason is FinishReason.STOP
    assert tokenizer.decode(second.observation_ids) == answer
    assert not set(second.observation_ids) & set(tokenizer.added_ids.values())
    assert (episode.reward, episode.stop_reason) == (1.0, StopReason.COMPLETED)
    told = tokenizer.decode(first.observation_ids)
    assert block.partition("\n")[0] in told and "<tool_call>" not in told and "Run Python." in told


async def test_code_of_a_turn_that_the_model_closed_is_answered_in_a_turn(
    play: Callable[..., Any], tokenizer: TurnTokenizer
) -> None:
    episode = await play(["```python\n1\n```", "\\boxed{7}"], tool_format="fences")
    seen = tokenizer.decode(episode.turns[1].observation_ids)
    assert seen == "\n<|im_start|>user\nCode execution result: ran '1'<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("tool_format", "said", "reason"),
    [
        ("hermes", "<tool_call>{oops</tool_call>", "not valid JSON"),
        ("fences", "```\nprint(1)\n```\n", "no code to run"),
        ("retool", "<code>print(1)", "not closed"),
    ],
)
async def test_a_malformed_call_is_an_observation(
    play: Callable[..., Any], tokenizer: TurnTokenizer, tool_format: str, said: str, reason: str
) -> None:
    episode = await play([said, "\\boxed{7}"], tool_format=tool_format)
    assert reason in tokenizer.decode(episode.turns[1].observation_ids)
    assert (episode.info["tool_errors"], episode.reward) == (1, 1.0)


async def test_a_spelled_out_marker_is_no_call_where_the_vocabulary_has_a_token_for_it(
    tokenizer: TurnTokenizer,
) -> None:
    block = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    spelled = [i for letter in block for i in tokenizer.encode_assistant(letter)]
    quoted = [*spelled, *tokenizer.encode_assistant(block.replace("f", "g")), tokenizer.close_id]
    parsed = tokenizer.parse(quoted, tools=TOOLS)
    assert [c.name for c in parsed.tool_calls] == ["g"] and parsed.content == block


def test_a_marker_that_is_no_token_is_read_as_text(tmp_path: Path) -> None:
    import dataclasses

    family = dataclasses.replace(QWEN25, markers=())
    turns = TurnTokenizer.load(str(write_family(family, tmp_path)))
    assert (
        turns.parse(turns.encode_assistant(turns.format.write(call("f", x=1))), tools=TOOLS).tool_calls[0].name == "f"
    )


@pytest.mark.parametrize("tool_format", ["hermes", "fences", "retool"])
def test_a_demonstration_is_read_back_as_it_was_written(tokenizer: TurnTokenizer, tool_format: str) -> None:
    turns = tokenizer.with_tool_format(tool_format)
    asked, done = call("python", code="print(1)\n"), Message(role="assistant", content="Done.")
    ids, mask = turns.demonstration([user("q"), asked, Message(role="tool", content="1"), done], TOOLS)
    first, second = turns.turn(asked), turns.turn(done)
    assert [i for i, m in zip(ids, mask, strict=True) if m] == [*first, *second]
    assert [c.arguments for c in turns.parse(first, tools=TOOLS).tool_calls] == [{"code": "print(1)\n"}]


@pytest.mark.parametrize("tools", [TOOLS * 2, [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
def test_code_formats_refuse_tools_that_are_no_interpreter(tokenizer: TurnTokenizer, tools: list[Any]) -> None:
    with pytest.raises(ConfigError, match="takes one tool with one argument"):
        tokenizer.with_tool_format("fences").first_prompt([user("q")], tools)


def test_an_unknown_format_is_refused(tokenizer: TurnTokenizer) -> None:
    with pytest.raises(ConfigError, match="known: auto, hermes"):
        tokenizer.with_tool_format("xml")
