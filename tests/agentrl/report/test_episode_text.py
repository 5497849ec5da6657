"""Episodes as they are printed."""

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from agentrl.report.episode_text import show_episode, show_tokens, tokens_of
from agentrl.testing import episode_of
from agentrl.types import (
    Completion,
    FinishReason,
    Message,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    VersionSpan,
    system,
    user,
)

CODE = "x = 1\nprint(x)"
CALL = ToolCall(id="call_0", name="python", arguments={"code": CODE, "limit": 3})
EPISODE = Trajectory(
    id="eval-0-1",
    task_id="t",
    turns=(
        Turn(
            observation_ids=(65, 66),
            completion=Completion(
                token_ids=(97, 98, 10),
                behavior_logprobs=(-0.01, -5.0, -1.0),
                version_spans=(VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=3)),
                finish_reason=FinishReason.STOP,
            ),
        ),
    ),
    messages=(
        system("Be brief."),
        user("What is [bold]x[/bold]?"),
        Message(role="assistant", content="I look.", tool_calls=(CALL,)),
        Message(role="tool", content="1", tool_call_id="call_0"),
        Message(role="assistant", content="1"),
    ),
    reward=1.5,
    rewards={"correct": 1.0, "step": 0.5},
    stop_reason=StopReason.MAX_TURNS,
    info={"turns": 2, "tool_calls": 1, "tool_errors": 0},
)


def console(*, colours: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=100, force_terminal=colours, color_system="truecolor" if colours else None), out


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def test_an_episode_reads_from_top_to_bottom() -> None:
    screen, out = console()
    show_episode(screen, Task(id="t", prompt="", answer="7"), episode_of(EPISODE))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[1:-1] == [
        "system",
        "  Be brief.",
        "user",
        "  What is [bold]x[/bold]?",
        "assistant",
        "  I look.",
        "    → python(code=↓, limit=3)",
        "      code:",
        "        x = 1",
        "        print(x)",
        "    tool call_0",
        "      1",
        "assistant",
        "  1",
        "reward 1.5 (correct 1, step 0.5)  ended: max_turns  2 turns, 1 tool call (0 errors), 3 tokens,",
    ]
    assert lines[-1] == "version 3  gold answer: 7"


def test_segments_are_shown_within_one_episode_with_one_summary() -> None:
    forked = episode_of(EPISODE, replace(EPISODE, id="eval-0-1.1", messages=(user("Your notes."),), info={}))
    screen, out = console()
    show_episode(screen, Task(id="t", prompt=""), forked)
    show_tokens(screen, forked, decode)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    for heading in ("segment 1 of 2", "segment 2 of 2"):
        assert lines.count(heading) == 2
    assert lines.index("segment 2 of 2") < lines.index("  Your notes.")
    assert sum(line.startswith("reward") for line in lines) == 2
    assert out.getvalue().count("6 tokens") == 2


def test_tokens_know_their_logprob_version_and_mask() -> None:
    tokens = list(tokens_of(EPISODE, decode))
    assert [token.text for token in tokens] == ["A", "B", "a", "b", "\n"]
    assert [token.is_action for token in tokens] == [False, False, True, True, True]
    assert [(token.logprob, token.version) for token in tokens[2:]] == [(-0.01, 3), (-5.0, 3), (-1.0, 4)]


def test_in_a_terminal_tokens_are_coloured() -> None:
    screen, out = console(colours=True)
    show_tokens(screen, episode_of(EPISODE), decode)
    text = out.getvalue()
    dim, green, red = "\x1b[2mA", "\x1b[32;48", "\x1b[31;48"
    assert dim in text
    assert text.index(dim) < text.rindex(green) < text.rindex(red)
    assert "⏎" in text
    assert "version:" in text


@pytest.mark.parametrize(
    "line", ["     0  not trained on  'A'", "     3  v3   -5.000     'b'", "     4  v4   -1.000     '\\n'"]
)
def test_without_colours_there_is_a_line_a_token(line: str) -> None:
    screen, out = console()
    show_tokens(screen, episode_of(EPISODE), decode)
    assert line in out.getvalue().splitlines()
