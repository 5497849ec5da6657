"""Prints recorded episodes for people: messages with roles coloured, or token by token with logprobs and versions.

Independent of how episodes are played.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.style import Style
from rich.text import Text

from agentrl.report.statistics import num_response_tokens, num_turns
from agentrl.types import EpisodeRecord, Message, StopReason, Task, ToolCall, Trajectory

ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "bold green", "tool": "yellow"}
_LOGPROB_COLOURS = ((-0.1, "green"), (-0.7, "default"), (-2.3, "yellow"), (-float("inf"), "red"))
"""(lower bound, colour): from tokens that the model was sure of to those that surprised it."""
MAX_PROMPT = 200  # characters of a prompt in one line
_VERSION_SHADES = ("grey15", "grey30", "navy_blue", "dark_green", "purple4")


def show_episode(console: Console, task: Task, episode: EpisodeRecord) -> None:
    """Print the messages of its segments, then how it ended."""
    console.print(Rule(Text(f"{episode.id}  task {task.id}")))
    for segment in _headed(console, episode):
        for message in segment.messages:
            show_message(console, message)
    console.print(summary(episode, answer=task.answer))


def _headed(console: Console, episode: EpisodeRecord) -> Iterator[Trajectory]:
    """The segments of an episode; where there are several, prints a heading before each."""
    for number, segment in enumerate(episode.segments, start=1):
        if len(episode.segments) > 1:
            console.print(Text(f"segment {number} of {len(episode.segments)}", style="dim"))
        yield segment


def show_message(console: Console, message: Message) -> None:
    """Print one turn: role, text, calls. The answers of tools are indented."""
    style = ROLE_STYLES[message.role]
    indent = 4 if message.role == "tool" else 0
    name = f"{message.role} {message.tool_call_id}" if message.tool_call_id else message.role
    console.print(Padding(Text(name, style=style), (0, 0, 0, indent)))
    if message.content:
        console.print(Padding(Text(message.content), (0, 0, 0, indent + 2)))
    for call in message.tool_calls:
        console.print(Padding(call_text(call), (0, 0, 0, 4)))


def call_text(call: ToolCall) -> Text:
    """`name(argument=...)`. Text of several lines, such as code, follows below."""
    text = Text("→ ", style="bold blue").append(call.name, style="bold blue").append("(")
    blocks: list[tuple[str, str]] = []
    for number, (name, value) in enumerate(call.arguments.items()):
        text.append(", " if number else "").append(f"{name}=")
        if isinstance(value, str) and "\n" in value:
            blocks.append((name, value))
            text.append("↓", style="dim")
        else:
            text.append(json.dumps(value, ensure_ascii=False))
    text.append(")")
    for name, value in blocks:
        text.append(f"\n  {name}:\n", style="dim").append("\n".join(f"    {line}" for line in value.splitlines()))
    return text


def task_line(task: Task) -> Text:
    """The id of a task, and the beginning of its prompt."""
    prompt = " ".join(task.prompt.split())
    return Text.assemble(
        ("task ", "dim"), (task.id, "bold"), f": {prompt[:MAX_PROMPT]}{'…' * (len(prompt) > MAX_PROMPT)}"
    )


def summary(episode: EpisodeRecord, *, answer: str | None = None) -> Text:
    """One line on the whole episode: reward and its parts, stop reason, turns, tools, tokens."""
    trajectory = episode.segments[0]
    colour = "green" if trajectory.reward > 0 else "red"
    parts = ", ".join(f"{name} {value:g}" for name, value in trajectory.rewards.items())
    text = Text.assemble((f"reward {trajectory.reward:g}", f"bold {colour}"), f" ({parts})" if parts else "")
    ended = "" if trajectory.stop_reason is StopReason.COMPLETED else "bold yellow"
    text.append("  ended: ").append(str(trajectory.stop_reason), style=ended)
    info = trajectory.info
    turns = int(info.get("turns", num_turns(episode.segments)))
    text.append(f"  {turns} {'turn' if turns == 1 else 'turns'}")
    if calls := info.get("tool_calls"):
        text.append(f", {calls:.0f} tool {'call' if calls == 1 else 'calls'} ({info.get('tool_errors', 0):.0f} errors)")
    text.append(f", {num_response_tokens(episode.segments):.0f} tokens")
    if versions := [segment.policy_version for segment in episode.segments if segment.turns]:
        text.append(f", version {min(versions)}")
    if answer is not None:
        text.append(f"  gold answer: {answer}", style="dim")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of a trajectory, decoded.

    Example:
        Token(text="42", is_action=True, logprob=-0.4, version=7)
    """

    text: str
    is_action: bool
    logprob: float  # natural log, under the weights that sampled; 0 where it is no action
    version: int


def tokens_of(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> Iterator[Token]:
    """All tokens of a trajectory, in order."""
    for token_id, mask, logprob, version in zip(
        trajectory.token_ids(),
        trajectory.action_mask(),
        trajectory.behavior_logprobs(),
        trajectory.policy_versions(),
        strict=True,
    ):
        yield Token(text=decode([token_id]), is_action=bool(mask), logprob=logprob, version=version)


def show_tokens(console: Console, episode: EpisodeRecord, decode: Callable[[Sequence[int]], str]) -> None:
    """Print token by token: the model's tokens coloured by logprob and shaded by policy version, the others dim.

    Without colours (a pipe, a file), one line for each token. Positions count from the start of each segment.
    """
    for segment in _headed(console, episode):
        _show_segment_tokens(console, segment, decode)
    console.print(summary(episode))


def _show_segment_tokens(console: Console, trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> None:
    tokens = list(tokens_of(trajectory, decode))
    if console.color_system is None or console.no_color:
        for position, token in enumerate(tokens):
            console.print(_token_line(position, token), soft_wrap=True)
    else:
        console.print(_legend(tokens))
        for _, run in groupby(tokens, key=lambda token: token.is_action):
            console.print(Text.assemble(*((_visible(token.text), _style(token)) for token in run)))


def _token_line(position: int, token: Token) -> Text:
    what = f"v{token.version} {token.logprob:8.3f}" if token.is_action else "not trained on"
    return Text(f"{position:6d}  {what:14}  {token.text!r}")


def _style(token: Token) -> Style:
    if not token.is_action:
        return Style(dim=True)
    colour = next(colour for bound, colour in _LOGPROB_COLOURS if token.logprob >= bound)
    return Style(color=colour, bgcolor=_VERSION_SHADES[token.version % len(_VERSION_SHADES)])


def _visible(text: str) -> str:
    """Line breaks as a visible sign and a line break."""
    return text.replace("\n", "⏎\n")


def _legend(tokens: Sequence[Token]) -> Text:
    text = Text("logprob: ")
    lower = [f"≥ {bound:g}" for bound, _ in _LOGPROB_COLOURS[:-1]]
    for label, (_, colour) in zip([*lower, "less"], _LOGPROB_COLOURS, strict=True):
        text.append(label, style=Style(color=colour)).append("  ")
    text.append("not trained on", style="dim").append("  version: ")
    for version in sorted({token.version for token in tokens if token.is_action}):
        text.append(f" {version} ", style=Style(bgcolor=_VERSION_SHADES[version % len(_VERSION_SHADES)])).append(" ")
    return text
