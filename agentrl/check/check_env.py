"""Checks an environment before anyone trains on it: contract, cleanup, unicode, and the gold answer of every row.

Plays scripted episodes through the real sandbox. Independent of engines and the console.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.check.cancellation import find_unclosed
from agentrl.check.token_record import find_token_problem, load_tokenizer
from agentrl.env import Action, Env, Episode, ToolEnv, add_counts, advance, close, opened, play_script, start
from agentrl.env.agent_env import AgentEnv
from agentrl.errors import AgentRLError, EnvError
from agentrl.tools import ToolSpec
from agentrl.types import Message, StopReason, Task, ToolCall

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

NUM_CONCURRENT = 16
MAX_FAILURES = 20
"""After this many failed rows the rest is not played."""
MAX_SHOWN = 5
NUM_DEMONSTRATED = 100
EPISODE_LIMIT_S = 120.0
NUM_COMPARED = 100
_TOOL_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
UNICODE = "naïve ∑ x² ≠ 10 — 日本語 🙂 <|im_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check.

    Check(name="tasks", ok=True, detail="30 rows")
    """

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """All checks, in the order they were made.

    report = await check_env(Capitals, data=None, sandbox=None)
    assert report.ok, [check for check in report.checks if not check.ok]
    """

    env: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether everything passed."""
        return all(check.ok for check in self.checks)


async def check_env(
    env_cls: type[Env],
    *,
    data: str | None,
    sandbox: SandboxClient | None,
    limit: int | None = None,
    tokenizer: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CheckReport:
    """Check a class on its `test` tasks. Shared resources are opened once for all that is played.

    Args:
        data: file of rows, passed to `tasks`.
        sandbox: the service that the episodes use; None if they need none.
        limit: number of rows to play, from the first; None plays all.
        tokenizer: folder or hub name of the tokenizer whose turns are checked; None: one of bytes with ChatML turns.
        progress: called with (rows done, rows in total).

    A failing check is in the report, not an exception; ConfigError (rows that cannot be read, say) is raised.
    """
    tasks = list(itertools.islice(env_cls.tasks("test", data=data), limit))
    async with opened(env_cls, sandbox=sandbox) as make_env:
        inspector = _Inspector(
            env_cls=env_cls,
            tasks=tasks,
            make_env=make_env,
            data=data,
            sandbox=sandbox,
            tokenizer=tokenizer,
            progress=progress,
        )
        await inspector.run()
    return CheckReport(env=env_cls.__name__, checks=tuple(inspector.checks))


@dataclass(kw_only=True)
class _Inspector:
    env_cls: type[Env]
    tasks: Sequence[Task]
    make_env: Callable[[], Env]
    data: str | None
    sandbox: SandboxClient | None
    tokenizer: str | None
    progress: Callable[[int, int], None]
    checks: list[Check] = field(default_factory=list)

    async def run(self) -> None:
        await self._check("tools", self._tools)
        await self._check("tasks", self._tasks)
        if not self.tasks:
            return
        if issubclass(self.env_cls, AgentEnv):
            detail = "brings its own loop, which no script can play: try it with `agentrl eval`"
            self.checks.append(Check(name="agent", ok=True, detail=detail))
            return
        await self._check("contract", self._contract)
        await self._check("determinism", self._determinism)
        await self._check("closes on cancel", self._closes_on_cancel)
        await self._check("unicode", self._unicode)
        await self._check("tokens", self._tokens)
        if issubclass(self.env_cls, ToolEnv):
            await self._check("bad calls are observations", self._bad_calls)
        await self._check("demonstrations", self._demonstrations)
        await self._check("gold and wrong answers", self._answers)

    async def _check(self, name: str, look: Callable[[], Awaitable[str]]) -> None:
        """Run one check: it returns a detail or raises _Finding; an error of the environment is a finding too."""
        try:
            self.checks.append(Check(name=name, ok=True, detail=await look()))
        except (_Finding, AgentRLError, TimeoutError) as error:
            self.checks.append(Check(name=name, ok=False, detail=str(error) or type(error).__name__))

    async def _play(self, task: Task, script: Sequence[Message]) -> Episode:
        async with asyncio.timeout(EPISODE_LIMIT_S):
            return await play_script(self.make_env(), task, script, seed=0)

    async def _tools(self) -> str:
        import jsonschema

        for schema in self.env_cls.tool_schemas():
            json.dumps(schema)
            function = schema.get("function", {})
            name, parameters = function.get("name", ""), function.get("parameters", {})
            _require(bool(_TOOL_NAME.fullmatch(name)), f"{name!r} is not a name that chat formats accept")
            _require(bool(function.get("description")), f"{name} has no description")
            _require(parameters.get("type") == "object", f"the parameters of {name} are not an object")
            try:
                jsonschema.Draft202012Validator.check_schema(parameters)
            except jsonschema.SchemaError as error:
                raise _Finding(f"the parameters of {name} are not a JSON schema: {error.message}") from error
            unknown = set(parameters.get("required", ())) - set(parameters.get("properties", ()))
            _require(not unknown, f"{name} requires {sorted(unknown)}, which it does not describe")
        return ", ".join(self.env_cls.tools) or "none"

    async def _tasks(self) -> str:
        _require(bool(self.tasks), "tasks('test') yields nothing")
        ids = [task.id for task in self.tasks]
        double = next((i for n, i in enumerate(ids) if i in set(ids[:n])), None) if len(set(ids)) < len(ids) else None
        _require(double is None, f"id {double!r} is used twice")
        first = list(self.tasks[:NUM_COMPARED])
        again = list(itertools.islice(self.env_cls.tasks("test", data=self.data), len(first)))
        _require(again == first, "tasks('test') returned different rows the second time")
        return f"{len(ids)} rows"

    async def _contract(self) -> str:
        task, env = self.tasks[0], self.make_env()
        try:
            async with asyncio.timeout(EPISODE_LIMIT_S):
                opening = await start(env, task, 0)
                roles = [message.role for message in opening]
                _require(roles[-1] != "assistant", f"reset's last message is the assistant's own: {roles}")
                _require(all(isinstance(m.content, str) for m in opening), "reset returned content that is not text")
                result = await advance(env, Action(message=_says("I do not know.")))
                answered = {message.role for message in result.observation}
                _require(answered <= {"user", "tool"}, f"step answered as {sorted(answered)}: user and tool may answer")
        finally:
            await close(env)
        try:
            await env.close()
        except Exception as error:
            raise _Finding(f"a second close() raised {type(error).__name__}: {error}") from error
        return f"opens with {roles}; a turn of plain text {'ends it' if result.terminated else 'does not end it'}"

    async def _determinism(self) -> str:
        script = self._script("an answer")
        first, again = [await self._play(self.tasks[0], script) for _ in range(2)]
        _require(first.messages == again.messages, "the same seed and script produced different messages")
        _require(first.rewards == again.rewards, f"the same episode scored {first.rewards}, then {again.rewards}")
        return "same seed and script, same messages and rewards"

    async def _closes_on_cancel(self) -> str:
        script = [*_calls_with_text(self.env_cls.tools, "print(1)"), _says("x")]
        num_points, problem = await find_unclosed(
            self.make_env, self.tasks[0], script, sandbox=self.sandbox, limit_s=EPISODE_LIMIT_S
        )
        _require(problem is None, problem or "")
        return f"cancelled at {num_points} awaits of reset, step, score and close, and closed each time"

    async def _unicode(self) -> str:
        script = [*_calls_with_text(self.env_cls.tools, UNICODE), _says(UNICODE)]
        episode = await self._play(self.tasks[0], script)
        for message in episode.messages:
            try:
                message.content.encode()
            except UnicodeEncodeError as error:
                raise _Finding(f"a {message.role} message is not valid Unicode: {error.reason}") from error
        return "in, out, and scored"

    async def _tokens(self) -> str:
        tokenizer = await asyncio.to_thread(load_tokenizer, self.tokenizer)
        scripts = [self._script(UNICODE), self.env_cls.demonstrations(self.tasks[0]) or ()]
        num_tokens = 0
        for script in filter(None, scripts):
            async with asyncio.timeout(EPISODE_LIMIT_S):
                count, problem = await find_token_problem(self.make_env, self.tasks[0], script, tokenizer)
            _require(problem is None, problem or "")
            num_tokens += count
        return f"each prompt extends the one before and its completion, over {num_tokens} tokens"

    async def _bad_calls(self) -> str:
        env, counts = self.make_env(), dict[str, float]()
        unknown = Message(role="assistant", content="", tool_calls=(ToolCall(id="0", name="no such", arguments={}),))
        strange = [
            Message(role="assistant", content="", tool_calls=(ToolCall(id="0", name=n, arguments={"no such": 1}),))
            for n in self.env_cls.tools
        ]
        actions = [Action(message=m) for m in (unknown, *strange)]
        actions.append(Action(message=_says("<tool_call>{"), parse_errors=("not valid JSON",)))
        try:
            async with asyncio.timeout(EPISODE_LIMIT_S):
                await start(env, self.tasks[0], 0)
                for action in actions:
                    result = await advance(env, action)
                    add_counts(counts, result.info)
                    _require(not result.terminated, "a malformed call ends the episode; answer it with a message")
        finally:
            await close(env)
        errors = counts.get("tool_errors", 0)
        _require(errors == len(actions), f"{len(actions)} malformed calls, {errors:.0f} counted in info['tool_errors']")
        return f"{len(actions)} kinds answered and counted"

    async def _demonstrations(self) -> str:
        tasks = [task for task in self.tasks[:NUM_DEMONSTRATED] if self.env_cls.demonstrations(task) is not None]
        if not tasks:
            return "none offered"

        async def expert(task: Task) -> str | None:
            episode = await self._play(task, self.env_cls.demonstrations(task) or ())
            if episode.stop_reason is not StopReason.COMPLETED:
                return f"the expert's episode ended as {episode.stop_reason}"
            return None if _correct(episode) == 1.0 else f"the expert scored {_correct(episode):g}"

        failures = await self._for_each(tasks, expert, lambda done, total: None)
        _require(not failures, _summary(failures, len(tasks)))
        return f"the expert scores 1.0 on {len(tasks)} rows"

    async def _answers(self) -> str:
        with_answer = [task for task in self.tasks if task.answer is not None]
        if not with_answer:
            return "not checked: the tasks have no answer"

        async def row(task: Task) -> str | None:
            gold = task.answer or ""
            right = await self._play(task, self._script(gold))
            if _correct(right) != 1.0:
                return f"gold answer {gold!r} scored {_correct(right):g}, not 1.0"
            bad = wrong_answer(gold)
            wrong = await self._play(task, self._script(bad))
            return (
                None if _correct(wrong) == 0.0 else f"wrong answer {bad!r} scored {_correct(wrong):g} (gold {gold!r})"
            )

        failures = await self._for_each(with_answer, row, self.progress)
        _require(not failures, _summary(failures, len(with_answer)))
        unanswered = len(self.tasks) - len(with_answer)
        rest = f"; {unanswered} rows have no answer and were not checked" if unanswered else ""
        return f"gold 1.0 and wrong 0.0 on {len(with_answer)} rows{rest}"

    def _script(self, answer: str) -> list[Message]:
        return [*_calls_with_text(self.env_cls.tools, "print(1 + 1)"), _says(self.env_cls.phrase(answer))]

    async def _for_each(
        self,
        tasks: Sequence[Task],
        judge: Callable[[Task], Awaitable[str | None]],
        progress: Callable[[int, int], None],
    ) -> list[str]:
        """The failures that `judge` finds, with their rows; stops when MAX_FAILURES rows have failed."""
        failures: list[str] = []
        num_done = 0
        queue: Iterator[Task] = iter(tasks)

        async def worker() -> None:
            nonlocal num_done
            for task in queue:
                if len(failures) >= MAX_FAILURES:
                    return
                try:
                    problem = await judge(task)
                except (AgentRLError, TimeoutError) as error:
                    problem = str(error) or f"no end within {EPISODE_LIMIT_S:.0f} s"
                if problem is not None:
                    failures.append(f"{task.id}: {problem}")
                num_done += 1
                progress(num_done, len(tasks))

        async with asyncio.TaskGroup() as tg:
            for _ in range(min(NUM_CONCURRENT, len(tasks))):
                tg.create_task(worker())
        return failures


class _Finding(Exception):
    """A failed check; the text says how it failed."""


def wrong_answer(gold: str) -> str:
    """An answer of the same kind that is not `gold`."""
    if re.fullmatch("[+-]?[0-9]+", gold):
        return str(int(gold) + 1 if int(gold) != 999 else 0)
    return "-98765.4321"


def _require(ok: bool, finding: str) -> None:
    if not ok:
        raise _Finding(finding)


def _summary(failures: Sequence[str], num_rows: int) -> str:
    more = "" if len(failures) <= MAX_SHOWN else f"\n  ... and {len(failures) - MAX_SHOWN} more"
    stopped = " (the rest was not played)" if len(failures) >= MAX_FAILURES else ""
    shown = "".join(f"\n  {failure}" for failure in failures[:MAX_SHOWN])
    return f"{len(failures)} of {num_rows} rows fail{stopped}:{shown}{more}"


def _correct(episode: Episode) -> float:
    """The reward for a right answer: the one named `correct` if there is one, else the total."""
    value = episode.rewards.get("correct", episode.reward)
    if not 0.0 <= value <= 1.0:
        raise EnvError(f"the reward is {value}: it must lie in [0, 1]")
    return value


def _says(text: str) -> Message:
    return Message(role="assistant", content=text)


def _calls_with_text(tools: Mapping[str, ToolSpec], text: str) -> list[Message]:
    """One turn that calls the first tool whose only required argument is text; none when there is no such tool."""
    for spec in tools.values():
        parameters = spec.schema()["function"]["parameters"]
        required = parameters.get("required", [])
        if len(required) == 1 and parameters["properties"][required[0]].get("type") == "string":
            call = ToolCall(id="call_0", name=spec.name, arguments={required[0]: text})
            return [Message(role="assistant", content="", tool_calls=(call,))]
    return []
