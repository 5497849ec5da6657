"""Checks an environment before anyone trains on it: its methods, clean-up, Unicode, and the gold answer of every row.

Plays scripted episodes through the real sandbox. Independent of engines, processes and the console.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from agentrl.check.answers import Answers
from agentrl.check.cancellation import find_unclosed
from agentrl.check.group_score import group_detail
from agentrl.check.limited import limited, limiting
from agentrl.check.made_up_calls import calling, calls_with_text, odd_output
from agentrl.check.report import (
    TIMEOUT_S,
    Check,
    CheckReport,
    Finding,
    Hung,
    Level,
    OnCheck,
    OnProgress,
    ignore,
    require,
    shown,
)
from agentrl.check.token_record import find_token_problem, load_tokenizer
from agentrl.env import (
    Action,
    Env,
    Episode,
    ToolEnv,
    add_counts,
    advance,
    attributed,
    checked_script,
    close,
    opened,
    places,
    play_script,
    rows_of,
    scored,
    start,
)
from agentrl.env.agent_env import AgentEnv
from agentrl.errors import AgentRLError, ConfigError, EnvError
from agentrl.supervision.threads import in_thread
from agentrl.tools import ToolSpec, is_tool
from agentrl.types import Message, StopReason, Task, ToolCall

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

NUM_COMPARED = 100
MAX_TASKS = 20_000
PATIENCE = 8
"""A whole episode, and an episode among many, may take this many deadlines."""
_TOOL_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
UNICODE = "naïve ∑ x² ≠ 10 — 日本語 🙂 <|im_end|>"


async def check_env(
    env_cls: type[Env],
    *,
    data: str | None,
    sandbox: SandboxClient | None,
    limit: int | None = None,
    tokenizer: str | None = None,
    timeout_s: float = TIMEOUT_S,
    on_begin: Callable[[str], None] = ignore,
    on_check: OnCheck = ignore,
    progress: OnProgress = ignore,
) -> CheckReport:
    """Check a class on its `test` tasks, in this process. Shared resources are opened once for all that is played.

    Code that blocks the event loop cannot be ended here: see `check_target`, which uses a process of its own.

    Args:
        data: file of rows, passed to `tasks`.
        sandbox: the service that the episodes use; None if they need none.
        limit: number of rows to play, from the first; None plays all.
        tokenizer: folder or hub name of the tokenizer whose turns are checked; None: one of bytes with ChatML turns.
        timeout_s: deadline of each call of a method. After a call that misses it, the checks end.
        on_begin: called with the name of each check when it begins.
        on_check: called with each result as it comes.
        progress: called with (rows done, rows in total).

    A failing check is in the report, not an exception; ConfigError (rows that cannot be read, say) is raised.
    """
    async with AsyncExitStack() as stack:
        inspector = _Inspector(
            env_cls=env_cls,
            data=data,
            sandbox=sandbox,
            limit=limit,
            tokenizer=tokenizer,
            timeout_s=timeout_s,
            on_begin=on_begin,
            on_check=on_check,
            progress=progress,
            stack=stack,
        )
        await inspector.run()
    return CheckReport(env=env_cls.__name__, checks=tuple(inspector.checks))


class _Stop(Exception):
    """No further check can be made."""


@dataclass(kw_only=True)
class _Inspector:
    env_cls: type[Env]
    data: str | None
    sandbox: SandboxClient | None
    limit: int | None
    tokenizer: str | None
    timeout_s: float
    on_begin: Callable[[str], None]
    on_check: OnCheck
    progress: OnProgress
    stack: AsyncExitStack
    checks: list[Check] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    tools: dict[str, ToolSpec] = field(default_factory=dict)  # those that work
    rewards: list[float] = field(default_factory=list)

    async def run(self) -> None:
        try:
            await self._run()
        except _Stop:
            return
        if self.rewards and not 0 <= min(self.rewards) <= max(self.rewards) <= 1:
            self._add("reward range", _outside(min(self.rewards), max(self.rewards)), "warn")

    async def _run(self) -> None:
        await self._check("tools", self._tools)
        await self._check("tasks", self._tasks, is_needed=True)
        await self._check("shared resources", self._open_shared, is_needed=True)
        if issubclass(self.env_cls, AgentEnv):
            self._add("agent", "it brings its own loop, which no script can play: try it with `agentrl eval`")
            return
        await self._check("one turn", self._one_turn, is_needed=True)
        await self._check("tool calls", self._tool_calls)
        await self._check("repeatable", self._repeatable, is_needed=True)
        await self._check("group score", self._group_score)
        await self._check("clean-up", self._clean_up)
        await self._check("Unicode", self._unicode)
        await self._check("tokens", self._tokens)
        if issubclass(self.env_cls, ToolEnv):
            await self._check("wrong calls", self._wrong_calls)
        play = partial(self._play, make_env=limiting(self.make_env, PATIENCE * self.timeout_s))
        answers = Answers(env_cls=self.env_cls, play=play, script=self._script, progress=self.progress)
        await self._check("demonstrations", lambda: answers.demonstrations(self.tasks))
        await self._check("answers", lambda: answers.gold_and_wrong(self.tasks))

    async def _check(self, name: str, look: Callable[[], Awaitable[str]], *, is_needed: bool = False) -> None:
        """Run one check, which returns a detail or raises; all that the environment raises is a finding too."""
        self.on_begin(name)
        try:
            with attributed(self.env_cls.__name__, passing=Finding):
                detail = await look()
        except (Finding, AgentRLError) as error:
            if isinstance(error, ConfigError) and not self.tasks:
                raise
            self._add(name, str(error) if isinstance(error, Finding) else " ".join(str(error).split()), "FAIL")
            if is_needed or isinstance(error, Hung):
                raise _Stop from error
        else:
            if detail:
                self._add(name, detail)

    def _add(self, name: str, detail: str, level: Level = "ok") -> None:
        """Record and report a result, unless it repeats an earlier failure word for word."""
        detail = shown(detail)
        if level == "FAIL" and any(check.detail == detail for check in self.checks):
            return
        self.checks.append(Check(name=name, detail=detail, level=level))
        self.on_check(self.checks[-1])

    async def _play(
        self, task: Task, script: Sequence[Message], *, make_env: Callable[[], Env] | None = None
    ) -> Episode:
        episode = await play_script((make_env or self._limited_env)(), task, script, seed=0)
        self.rewards += [episode.reward, *episode.rewards.values()]
        return episode

    async def _tools(self) -> str:
        import jsonschema

        cls = self.env_cls
        marked = [name for name in dir(cls) if is_tool(getattr(cls, name, None))]
        require(
            not marked or issubclass(cls, ToolEnv),
            f"{cls.__name__} has @tool methods ({', '.join(marked)}), which only a ToolEnv offers to the model: write "
            f"`class {cls.__name__}(ToolEnv):`{places.in_brackets(places.defined_at(cls))}",
        )
        for schema in cls.tool_schemas():
            json.dumps(schema)
            function = schema.get("function", {})
            name, parameters = function.get("name", ""), function.get("parameters", {})
            require(bool(_TOOL_NAME.fullmatch(name)), f"{name!r} is not a name that chat formats accept")
            require(bool(function.get("description")), f"{name} has no description, which the model reads")
            require(parameters.get("type") == "object", f"the parameters of {name} are not an object")
            try:
                jsonschema.Draft202012Validator.check_schema(parameters)
            except jsonschema.SchemaError as error:
                raise Finding(f"the parameters of {name} are not a JSON schema: {error.message}") from error
            unknown = set(parameters.get("required", ())) - set(parameters.get("properties", ()))
            require(not unknown, f"{name} requires {sorted(unknown)}, which it does not describe")
        self.tools = dict(cls.tools)
        return f"the model is offered {', '.join(self.tools)}" if self.tools else "none: the model can only write text"

    async def _tasks(self) -> str:
        what, place = f"{self.env_cls.__name__}.tasks", places.defined_at(self.env_cls.tasks)
        at = places.in_brackets(place)
        tasks = await self._rows(min(self.limit or MAX_TASKS + 1, MAX_TASKS + 1))
        require(bool(tasks), f"{what}('test') gives no tasks: return a list of Task(...), or yield them{at}")
        require(
            len(tasks) <= MAX_TASKS,
            f"{what}('test') gives more than {MAX_TASKS:,} tasks: it must end, because it is the set that models are "
            f"measured on; only 'train' may be endless. --limit N checks the first N{at}",
        )
        seen: set[str] = set()
        for task in tasks:
            require(
                task.id not in seen, f"{what}('test'): the id {task.id!r} is used twice; give each task its own{at}"
            )
            seen.add(task.id)
        first = tasks[:NUM_COMPARED]
        again = await self._rows(len(first))
        require(again == first, f"{what}('test') gave other tasks at the second call: draw them with a fixed seed{at}")
        self.tasks = tasks
        return f"{len(tasks)} {'task' if len(tasks) == 1 else 'tasks'} in 'test', each with its own id"

    async def _rows(self, count: int) -> list[Task]:
        """The first `count` tasks, read in a thread: `tasks` is not asynchronous."""
        cls = self.env_cls

        def read() -> list[Task]:
            return list(itertools.islice(rows_of(cls, "test", data=self.data), count))

        async with limited(f"{cls.__name__}.tasks", self.timeout_s, at=cls.tasks):
            return await in_thread(read, name="tasks")

    async def _open_shared(self) -> str:
        cls = self.env_cls
        async with limited(f"{cls.__name__}.open_shared", self.timeout_s, at=cls.open_shared):
            self.make_env = await self.stack.enter_async_context(opened(cls, sandbox=self.sandbox))
        self._limited_env = limiting(self.make_env, self.timeout_s)
        is_default = getattr(cls.open_shared, "__func__", None) is getattr(Env.open_shared, "__func__", None)
        return "" if is_default else "open_shared opens"

    async def _one_turn(self) -> str:
        """Each method once, in the order of an episode."""
        task, env, name = self.tasks[0], self._limited_env(), self.env_cls.__name__
        try:
            opening = await start(env, task, 0)
            roles = [message.role for message in opening]
            require(roles[-1] != "assistant", f"{name}.reset: its last message is the model's own: end with user(...)")
            said = _says("I do not know.")
            result = await advance(env, Action(message=said))
            answered = {message.role for message in result.observation}
            require(answered <= {"user", "tool"}, f"{name}.step answered as {sorted(answered)}: write user(...)")
            end = StopReason.COMPLETED if result.terminated else StopReason.TRUNCATED
            messages = (*opening, said, *result.observation)
            episode = Episode(task=task, messages=messages, stop_reason=end, step_reward=result.reward)
            episode = await scored(env, episode)
            for when in ("", " (the second call: it must be safe to call twice)"):
                with attributed(f"{name}.close{when}", at=self.env_cls.close):
                    await env.close()
        finally:
            await close(env)
        ends = "ends the episode" if result.terminated else "does not end the episode"
        named = ", ".join(f"{key}={value:g}" for key, value in episode.rewards.items()) or "no named reward"
        return f"opens with {', '.join(roles)}; plain text {ends}; an empty answer scores {named}"

    async def _tool_calls(self) -> str:
        """Call each tool once, with arguments that fit its schema."""
        for name, spec in list(self.tools.items()):
            env = self._limited_env()
            try:
                await start(env, self.tasks[0], 0)
                result = await advance(env, Action(message=calling(spec)))
            except Hung:
                raise
            except EnvError as error:
                del self.tools[name]
                hint = "" if "cannot be shown" in str(error) else ". Is it the model's mistake? `raise ToolError(text)`"
                self._add(f"tool {name}", f"{' '.join(str(error).split())}{hint}", "FAIL")
                continue
            finally:
                await close(env)
            if warning := odd_output(name, result.observation[0].content if result.observation else ""):
                self._add(f"tool {name}", warning, "warn")
                del self.tools[name]  # a long output would make every other check slow
        return f"{', '.join(self.tools)} called with made-up arguments" if self.tools else ""

    async def _repeatable(self) -> str:
        script = self._script("an answer")
        first, again = [await self._play(self.tasks[0], script) for _ in range(2)]
        use_seed = "take what is random from the `seed` of reset"
        require(first.messages == again.messages, f"the same seed and script gave different messages: {use_seed}")
        require(
            first.rewards == again.rewards,
            f"the same episode scored {dict(first.rewards)}, then {dict(again.rewards)}: {use_seed}"
            f"{places.in_brackets(places.defined_at(self.env_cls.score))}",
        )
        return "the same seed and messages give the same episode and score"

    async def _group_score(self) -> str:
        if not self._limited_env().scores_groups:
            return ""
        return await group_detail(self._limited_env, await self._play(self.tasks[0], self._script("an answer")))

    async def _clean_up(self) -> str:
        script = [*calls_with_text(self.tools, "print(1)"), _says("x")]
        num_points, problem = await find_unclosed(
            self._limited_env, self.tasks[0], script, sandbox=self.sandbox, limit_s=PATIENCE * self.timeout_s
        )
        require(problem is None, problem or "")
        return f"closed after a cancellation at each of {num_points} awaits of reset, step, score and close"

    async def _unicode(self) -> str:
        episode = await self._play(self.tasks[0], [*calls_with_text(self.tools, UNICODE), _says(UNICODE)])
        for message in episode.messages:
            try:
                message.content.encode()
            except UnicodeEncodeError as error:
                raise Finding(f"a {message.role} message is not valid Unicode: {error.reason}") from error
        return "reaches the tools and the score unchanged"

    async def _tokens(self) -> str:
        tokenizer = await in_thread(partial(load_tokenizer, self.tokenizer), name="tokenizer")
        scripts = [self._script(UNICODE), checked_script(self.env_cls, self.tasks[0]) or ()]
        num_tokens = 0
        for script in filter(None, scripts):
            count, problem = await find_token_problem(self._limited_env, self.tasks[0], script, tokenizer)
            require(problem is None, problem or "")
            num_tokens += count
        whose = (
            f"with the tokenizer of {self.tokenizer}" if self.tokenizer else "as bytes (--tokenizer MODEL: a model's)"
        )
        return f"each prompt repeats the turns before it exactly, over {num_tokens} tokens {whose}"

    async def _wrong_calls(self) -> str:
        env, counts = self._limited_env(), dict[str, float]()
        wrong = [
            Message(role="assistant", content="", tool_calls=(ToolCall(id="0", name=n, arguments={"no such": 1}),))
            for n in ("no such", *self.env_cls.tools)
        ]
        actions = [Action(message=m) for m in wrong]
        actions.append(Action(message=_says("<tool_call>{"), parse_errors=("not valid JSON",)))
        try:
            await start(env, self.tasks[0], 0)
            for action in actions:
                result = await advance(env, action)
                add_counts(counts, result.info)
                require(not result.terminated, "a malformed call ends the episode: answer it with a message")
        finally:
            await close(env)
        errors = counts.get("tool_errors", 0)
        require(errors == len(actions), f"{len(actions)} malformed calls, {errors:.0f} counted in info['tool_errors']")
        return "unknown tools, wrong arguments and broken JSON are answered with an error text"

    def _script(self, answer: str) -> list[Message]:
        cls = self.env_cls
        with attributed(f"{cls.__name__}.phrase", method="phrase", at=cls.phrase):
            phrased = cls.phrase(answer)
        if not isinstance(phrased, str):
            at = places.in_brackets(places.defined_at(cls.phrase))
            raise EnvError(f"{cls.__name__}.phrase returned {phrased!r}, which is not text{at}")
        return [*calls_with_text(self.tools, "print(1 + 1)"), _says(phrased)]


def _outside(low: float, high: float) -> str:
    return (
        f"rewards from {low:g} to {high:g} were seen, outside [0, 1]. They are trained on as they are, and gradients "
        "grow with them; pass@k counts an episode as solved from 1.0 on, and rollout.task_choice=difficulty cuts them "
        "to [0, 1]. Return values in [0, 1], or scale them: reward_weights, or the wrapper RewardScale"
    )


def _says(text: str) -> Message:
    return Message(role="assistant", content=text)
