"""`agentrl env play`: a person types the model's messages in a terminal. Drives one episode; independent of tokens."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import os
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl.env.agent_env import AgentEnv
from agentrl.env.base import Action, Env, Episode, StepResult
from agentrl.env.driver import Dialogue, close, uninterrupted_close
from agentrl.env.registry import load_env_class
from agentrl.env.returned import rows_of
from agentrl.env.scoring import scored
from agentrl.env.shared import opened
from agentrl.errors import ConfigError
from agentrl.report.console import EvalConsole
from agentrl.report.episode_text import call_text, show_message
from agentrl.tools import ToolSpec
from agentrl.types import Message, Task, ToolCall

PROMPT = "you> "
MORE = "...> "
HELP = """Type the message of the model. A line that is a call is run: python(code="print(1)") or
{"name": "python", "arguments": {"code": "print(1)"}}. A call may have several lines, until its bracket closes;
an empty line ends one that does not. /tools lists the tools, /quit ends the episode (so do Ctrl-C and Ctrl-D)."""


async def play_in_terminal(target: str, *, kwargs: Mapping[str, Any], data: str | None, index: int, seed: int) -> None:
    """Play one episode of test task number `index`. Raises AgentRLError; ConfigError for what cannot be played."""
    env_class = load_env_class(target, kwargs)
    if issubclass(env_class, AgentEnv):
        raise ConfigError(f"{env_class.__name__} brings its own loop: there are no turns to play")
    task = next(itertools.islice(rows_of(env_class, "test", data=data), index, None), None)
    if task is None:
        raise ConfigError(f"{target} has no test task number {index}")
    from sandbox.client import SandboxClient

    terminal = EvalConsole()
    async with SandboxClient.embedded() as sandbox, opened(env_class, sandbox=sandbox) as make_env:
        terminal.line(f"{env_class.__name__}, task {task.id}, seed {seed}; /help says how to play")
        speaker = TerminalSpeaker(Console(highlight=False), InputLines())
        await uninterrupted_close(speaker.play(make_env(), task, seed))


class InputLines:
    """Lines of standard input, or of a file descriptor: a terminal, a pipe, a file.

    Example:
        lines = InputLines()
        while (line := await lines.next()) is not None: ...
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = sys.stdin.fileno() if fd is None else fd
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._rest = b""
        self._is_at_end = False
        # Not sys.stdin: a thread that waits in it would keep this process alive.
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), name="input", daemon=True).start()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        data = b"x"
        while data:
            try:
                data = os.read(self._fd, 65536)
            except OSError:
                data = b""
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._queue.put_nowait, data)

    async def next(self) -> str | None:
        """The next line without its newline; None at the end of the input."""
        while b"\n" not in self._rest and not self._is_at_end:
            data = await self._queue.get()
            self._rest += data
            self._is_at_end = not data
        if not self._rest:
            return None
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")


class _Quit(Exception):
    """The player leaves."""


class TerminalSpeaker:
    """A Speaker whose turns a person types in a terminal.

    Example:
        episode = await TerminalSpeaker(Console(), InputLines()).play(make("ModMath-v0"), task, seed=0)
    """

    def __init__(self, console: Console, lines: InputLines) -> None:
        self._console = console
        self._lines = lines
        self._tools: Mapping[str, ToolSpec] = {}

    async def play(self, env: Env, task: Task, seed: int) -> Episode | None:
        """The scored episode; None when the person left before its end. The environment is closed."""
        dialogue = Dialogue(env=env, task=task)
        try:
            await dialogue.begin(seed)
            self._tools = env.tools
            self._list_tools(self._tools)
            self._show(dialogue.messages)
            try:
                stop_reason = await dialogue.play(self, max_turns=env.max_turns)
            except _Quit:
                self._console.print(Text("\nleft before the end: not scored", style="yellow"))
                return None
            episode = await scored(env, dialogue.episode(stop_reason))
        finally:
            await close(env)
        self._console.print(_result(episode))
        return episode

    async def speak(self, turn: int, *, is_last: bool) -> Action:
        """See Speaker. Raises _Quit."""
        message = await self._read_turn(self._tools, turn)
        for call in message.tool_calls:
            self._console.print(call_text(call))
        return Action(message=message)

    def observe(self, result: StepResult) -> Sequence[Message]:
        """See Speaker."""
        self._show(result.observation)
        if result.reward:
            self._console.print(Text(f"reward of this turn: {result.reward:g}", style="green"))
        return result.observation

    async def _read_turn(self, tools: Mapping[str, ToolSpec], turn: int) -> Message:
        """The next message; commands on the way are carried out. Raises _Quit."""
        while True:
            line = await self._line(PROMPT)
            if line == "/quit":
                raise _Quit
            if line == "/help":
                self._console.print(Text(HELP))
            elif line == "/tools":
                self._list_tools(tools)
            elif line.startswith("/"):
                self._console.print(Text(f"no such command: {line}; /help lists them", style="yellow"))
            elif line.strip() and (message := await self._read_message(line, tools, turn)):
                return message

    async def _read_message(self, text: str, tools: Mapping[str, ToolSpec], turn: int) -> Message | None:
        """The message in `text`: a call, which may need more lines, or text; None for a wrong call. Raises _Quit."""
        while (call := parse_call(text, tools)) == "incomplete":
            line = await self._line(MORE)
            if not line:
                break
            text += "\n" + line
        if call == "wrong":
            hint = "not sent: write each argument with its name and a value, as in tool(argument=1); /tools lists them"
            self._console.print(Text(hint, style="yellow"))
            return None
        if isinstance(call, tuple):
            name, arguments = call
            tool_call = ToolCall(id=f"call_{turn}", name=name, arguments=arguments)
            return Message(role="assistant", content="", tool_calls=(tool_call,))
        return Message(role="assistant", content=text)

    async def _line(self, prompt: str) -> str:
        self._console.print(Text(prompt, style="bold green"), end="")
        line = await self._lines.next()
        if line is None:
            raise _Quit
        return line

    def _show(self, messages: Collection[Message]) -> None:
        for message in messages:
            show_message(self._console, message)

    def _list_tools(self, tools: Mapping[str, ToolSpec]) -> None:
        for spec in tools.values():
            properties = spec.schema()["function"]["parameters"].get("properties", {})
            signature = ", ".join(f"{name}: {_kind(schema)}" for name, schema in properties.items())
            self._console.print(Text.assemble(("tool ", "dim"), (spec.name, "bold blue"), f"({signature})"))
            self._console.print(Text(f"     {spec.description.splitlines()[0]}", style="dim"))
            for name, schema in properties.items():
                if described := schema.get("description"):
                    self._console.print(Text(f"     {name}: {' '.join(str(described).split())}", style="dim"))


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    if "anyOf" in schema:
        return " | ".join(_kind(option) for option in schema["anyOf"])
    return str(schema.get("type", "any"))


def _result(episode: Episode) -> Text:
    rewards = ", ".join(f"{name} {value:g}" for name, value in episode.rewards.items())
    text = Text.assemble((f"reward {episode.reward:g}", "bold green" if episode.reward > 0 else "bold red"))
    text.append(f" ({rewards})" if rewards else "").append(f"  ended: {episode.stop_reason}")
    if episode.task.answer is not None:
        text.append(f"  gold answer: {episode.task.answer}", style="dim")
    return text


def parse_call(text: str, tools: Collection[str]) -> tuple[str, dict[str, Any]] | str:
    """(name, arguments) of a call written as `tool(argument=...)` or as JSON, "text" for anything else.

    "incomplete" when it begins like a call and more lines may complete it; "wrong" for a call of a tool with arguments
    that have no name or are no literals. Values are Python literals or JSON's.
    """
    stripped = text.strip()
    if stripped.startswith("{"):
        return _parse_json(stripped)
    name, bracket, _ = stripped.partition("(")
    if not bracket or name not in tools:
        return "text"
    try:
        node = ast.parse(stripped, mode="eval").body
    except SyntaxError:
        return "incomplete"
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return "text"
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return "wrong"
    try:
        return name, {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    except ValueError:
        return "wrong"


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in (constants := {"true": True, "false": False, "null": None}):
        return constants[node.id]
    return ast.literal_eval(node)


def _parse_json(text: str) -> tuple[str, dict[str, Any]] | str:
    try:
        call = json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        return "incomplete" if error.pos >= len(text) or error.msg.startswith("Unterminated") else "text"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return "text"
    arguments = call.get("arguments", {})
    return (call["name"], arguments) if isinstance(arguments, dict) else "text"
