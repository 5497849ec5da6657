"""Infrastructure is not the task: whole runs in which a real part breaks. No reward comes of it, and it is named."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from aiohttp import ClientSession, web

from agentrl.config import Config, SandboxConfig
from agentrl.env import Env, Episode, Split, make
from agentrl.env.canary import Canaries
from agentrl.errors import AgentRLError, CanaryFailed, ErrorRateExceeded
from agentrl.report.metrics import read
from agentrl.run_folder import EpisodeKind, RunFolder
from agentrl.supervision import child as supervise
from agentrl.supervision.child import Child, ChildDied
from agentrl.supervision.serving import free_port
from agentrl.testing import ScriptedEngine, call
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.train import launch
from agentrl.types import Message, StopReason, Task, Trajectory
from envs.aime import Aime, AimePython
from envs.grading import final_answer
from envs.math_python import Math
from sandbox.client import SandboxClient, SessionLost
from tests.agentrl.train.troubles import Trouble
from tests.agentrl.train.whole_run import make_config, run_with

LOST = Trouble("the sandbox service no longer knows this session")
BROKEN_SERVICE = Trouble("POST ...: HTTP 500: ...")
CANARY = Trouble("canary ...: ... Rewards since the last good check cannot be trusted")
KINDS: tuple[EpisodeKind, ...] = ("train", "eval")
HALF = "\\frac{1}{2}"


def rows(split: Split, answer: str) -> Iterable[Task]:
    return [Task(id=f"{split}-{i}", prompt="Find it.", answer=answer) for i in range(4)]


class Known(AimePython):
    """Rows of its own; the answer is 33."""

    system_prompt = "Use Python."
    canary_answers = (("33", "033", "34"),)

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return rows(split, "33")


class Halves(Math):
    """The answer needs math-verify."""

    system_prompt = "Halve."

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return rows(split, HALF)


class Solver(ScriptedEngine):
    """Asks the tool once where there is one, then answers rightly and wrongly in turn; breaks something at step 1."""

    def __init__(self, tokenizer: TurnTokenizer, *, answers: tuple[str, str], break_it: Callable[[], None]) -> None:
        super().__init__(tokenizer=tokenizer, script=self._solve)
        self._break_it: Callable[[], None] | None = break_it
        self._answers, self._count = answers, 0

    def _solve(self, prompt: str) -> str | Message:
        self._break()
        if "Use Python." in prompt and "<tool_response>\n" not in prompt:
            return call("python", code="print(33)")
        self._count += 1
        return f"It is \\boxed{{{self._answers[self._count % 2]}}}."

    def _break(self) -> None:
        if self.policy_version >= 1 and self._break_it is not None:
            broken, self._break_it = self._break_it, None
            broken()


class AsksTwice(Solver):
    """Asks the tool twice, and breaks something only before a second call, when the episode has an open session."""

    def _solve(self, prompt: str) -> str | Message:
        match prompt.count("<tool_response>\n"):
            case 0:
                return call("python", code="print(33)")
            case 1:
                self._break()
                return call("python", code="print(33)")
            case _:
                return super()._solve(prompt)


async def outcome(
    config: Config,
    tokenizer: TurnTokenizer,
    env_class: type[Env],
    break_it: Callable[[], None],
    *,
    solver: type[Solver] = Solver,
    **parts: Any,
) -> AgentRLError | None:
    """What ended a run in which `break_it` was called after the first step."""
    answers = ("0.5", "0.25") if issubclass(env_class, Halves) else ("33", "34")
    engine = solver(tokenizer, answers=answers, break_it=break_it)
    try:
        await run_with(config, engine, tokenizer, parts={"env_class": env_class, **parts})
    except AgentRLError as error:
        return error
    return None


def config_for(tmp_path: Path, *, steps: int = 100, **rollout: Any) -> Config:
    """Eight groups are under way at once, so that enough of them fail; more steps than what is under way can make."""
    return make_config(tmp_path, steps=steps, eval_every=0, **{"max_lag": 3, **rollout})


def recorded(config: Config) -> list[Trajectory]:
    """Every trajectory the run wrote down."""
    run = RunFolder.open(Path(config.out_dir) / config.name)
    groups = [
        g for kind in KINDS for step in run.trajectory_steps(kind=kind) for g in run.read_trajectories(step, kind=kind)
    ]
    return [trajectory for group in groups for trajectory in group.trajectories]


def assert_every_reward_is_earned(config: Config) -> None:
    """Each recorded reward is the one that the answer deserves, and none is of an episode that a part cut short."""
    trajectories = recorded(config)
    assert trajectories
    for trajectory in trajectories:
        said = final_answer(trajectory.messages[-1].content)
        assert trajectory.reward == float(said in ("33", "0.5"))
        assert trajectory.stop_reason is StopReason.COMPLETED
    last = [line for line in read(Path(config.out_dir) / config.name / "metrics.jsonl") if line.kind == "step"][-1]
    assert last.values["ledger/trained"] == 2 * last.step


@asynccontextmanager
async def sandbox_process() -> AsyncIterator[tuple[SandboxClient, asyncio.subprocess.Process]]:
    """The service as a process that a test can kill."""
    port = free_port()
    command = [sys.executable, "-m", "sandbox", "--port", str(port), "--token-env", "TOKEN", "--slots", "2"]
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "TOKEN": "t"}, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with SandboxClient(f"http://127.0.0.1:{port}", token="t") as client:
            async with asyncio.timeout(60):
                while not await _answers(client):
                    await asyncio.sleep(0.1)
            yield client, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _answers(client: SandboxClient) -> bool:
    try:
        await client.health()
    except Exception:
        return False
    return True


@asynccontextmanager
async def supervised_sandbox(config: Config, logs: Path) -> AsyncIterator[tuple[SandboxClient, Child]]:
    """The service as a run starts it: watched, and started again."""
    async with launch.sandbox_service(config, logs=logs, token="t") as (client, parts):
        await launch.sandbox_ready(client, parts, max_restarts=config.sandbox.max_restarts)
        async with launch.watching(*parts):
            yield client, parts[0]


def kill_service(part: Child) -> None:
    """SIGKILL to the service below its guard."""
    children = Path(f"/proc/{part.process.pid}/task/{part.process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)


async def test_a_sandbox_that_is_killed_is_started_again_and_its_episodes_are_played_again(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    # With max_lag 0 a step can only be made of the very groups that the kill hits.
    config = config_for(tmp_path, steps=6, max_retries=2, max_lag=0)
    async with supervised_sandbox(config, tmp_path) as (client, part):
        killing, session = partial(kill_service, part), await client.session()
        make_env = partial(make, Known, sandbox=client)
        assert await outcome(config, tokenizer, Known, killing, solver=AsksTwice, make_env=make_env) is None
        assert part.num_starts == 2
        with pytest.raises(SessionLost) as found:
            await session.exec("print(1)")
    assert LOST.is_in(found.value)
    assert sum(trajectory.info.get("retries", 0) for trajectory in recorded(config)) >= 1
    assert_every_reward_is_earned(config)


async def test_a_sandbox_that_cannot_be_started_again_ends_the_run_by_name(
    tmp_path: Path, tokenizer: TurnTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service dies once more than it may."""
    monkeypatch.setattr(supervise, "RESTART_AFTER_S", 0.01)
    config = config_for(tmp_path, max_retries=2).model_copy(update={"sandbox": SandboxConfig(max_restarts=1)})

    async def killing(part: Child) -> None:
        while True:
            with suppress(OSError, IndexError):  # between its death and its next start
                kill_service(part)
            await asyncio.sleep(0.05)

    with pytest.raises(ChildDied, match=r"(?s)the sandbox process ended .*SIGKILL.*started 2 times.*sandbox\.log"):
        async with supervised_sandbox(config, tmp_path) as (client, part):
            begun = asyncio.Event()
            killer = asyncio.create_task(_after(begun, killing(part)))
            try:
                await outcome(config, tokenizer, Known, begun.set, make_env=partial(make, Known, sandbox=client))
            finally:
                killer.cancel()
    assert_every_reward_is_earned(config)


async def _after(begun: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    await begun.wait()
    await work


async def test_a_sandbox_that_is_killed_for_good_ends_the_run(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    config = config_for(tmp_path)
    async with sandbox_process() as (client, process):
        error = await outcome(config, tokenizer, Known, process.kill, make_env=partial(make, Known, sandbox=client))
    assert isinstance(error, ErrorRateExceeded)
    assert re.search(r"6 of the last \d+ groups failed .* The first failure: tool python: Sandbox", str(error))
    assert_every_reward_is_earned(config)


@asynccontextmanager
async def sick_sandbox() -> AsyncIterator[tuple[SandboxClient, threading.Event]]:
    """A proxy before a real sandbox that answers 500 once the event is set."""
    sick = threading.Event()
    async with SandboxClient.embedded(slots=2) as client, ClientSession() as http:

        async def forward(request: web.Request) -> web.Response:
            if sick.is_set():
                return web.Response(status=500, text="out of disk")
            body, headers = await request.read(), client._headers
            async with http.request(request.method, client.url + request.path, data=body, headers=headers) as reply:
                return web.Response(status=reply.status, body=await reply.read())

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            async with SandboxClient(f"http://127.0.0.1:{port}") as before:
                yield before, sick
        finally:
            await runner.cleanup()


async def test_a_sandbox_that_answers_500_ends_the_run(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    config = config_for(tmp_path)
    async with sick_sandbox() as (client, sick):
        error = await outcome(config, tokenizer, Known, sick.set, make_env=partial(make, Known, sandbox=client))
    assert isinstance(error, ErrorRateExceeded)
    assert "tool python: SandboxUnavailable" in str(error)
    assert BROKEN_SERVICE.is_in(error) and "HTTP 500: out of disk" in str(error)
    assert_every_reward_is_earned(config)


def kill_graders() -> int:
    """SIGKILL to the math-verify workers of this process; how many there were."""
    killed = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"envs.equality_worker" in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
                killed += 1
        except OSError:
            continue
    return killed


@contextmanager
def deadly_for_graders() -> Iterator[Callable[[], None]]:
    """From the call of what is yielded, every grader is killed as soon as it lives."""
    begin, end = threading.Event(), threading.Event()

    def hunt() -> None:
        begin.wait()
        while not end.wait(0.02):
            kill_graders()

    hunter = threading.Thread(target=hunt)
    hunter.start()
    try:
        yield begin.set
    finally:
        end.set()
        begin.set()
        hunter.join()


async def test_graders_that_keep_dying_end_the_run(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    config = config_for(tmp_path)
    with deadly_for_graders() as start_killing:
        error = await outcome(config, tokenizer, Halves, start_killing)
    assert isinstance(error, ErrorRateExceeded)
    assert re.search("The first failure: grader: (the math-verify worker|math-verify gave no answer)", str(error))
    assert_every_reward_is_earned(config)


async def test_a_grader_that_dies_once_costs_a_second_try(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    config = config_for(tmp_path, steps=3, max_lag=0, max_retries=2)
    killed: list[int] = []
    assert await outcome(config, tokenizer, Halves, lambda: killed.append(kill_graders())) is None
    assert sum(killed) >= 1
    assert sum(trajectory.info.get("retries", 0) for trajectory in recorded(config)) >= 1
    assert_every_reward_is_earned(config)


class Breaks(Aime):
    """Fails where `part` says once it is broken."""

    canary_answers = Known.canary_answers
    system_prompt = "Think."
    part: ClassVar = ""
    is_broken: ClassVar = False

    @classmethod
    def broken(cls, part: str) -> None:
        if cls.is_broken and cls.part == part:
            raise RuntimeError(f"{part} has lost its table")

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterator[Task]:
        for number in range(1000 if split == "train" else 4):
            cls.broken("tasks")
            yield Task(id=f"{split}-{number}", prompt="Find it.", answer="33")

    async def reset(self, *, task: Task, seed: int | None = None) -> Any:
        self.broken("reset")
        return await super().reset(task=task, seed=seed)

    async def step(self, action: Any) -> Any:
        self.broken("step")
        return await super().step(action)

    async def score(self, episode: Episode) -> dict[str, float]:
        self.broken("score")
        return await super().score(episode)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("reset", "reset of task train-"),
        ("step", "Breaking.step: RuntimeError: step has lost its table"),
        ("score", "score of task train-"),
        ("tasks", "Breaking.tasks: RuntimeError: tasks has lost its table"),
    ],
)
async def test_an_environment_that_raises_ends_the_run(
    tmp_path: Path, tokenizer: TurnTokenizer, part: str, said: str
) -> None:
    class Breaking(Breaks):
        pass

    Breaking.part = part
    config = config_for(tmp_path)
    error = await outcome(config, tokenizer, Breaking, partial(setattr, Breaking, "is_broken", True))
    assert error is not None
    assert said in str(error)
    assert "has lost its table" in "".join(traceback.format_exception(error)).split("RuntimeError")[1]
    assert "in broken" in "".join(traceback.format_exception(error))  # the line that raised
    assert_every_reward_is_earned(config)


async def test_a_data_file_that_vanishes_is_not_missed(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    """Rows are in memory from the start: the run goes on without the file."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "Halve 1.", "answer": "\\\\frac{1}{2}"}\n')

    class FromFile(Halves):
        @classmethod
        def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
            return Math.tasks(split, data=str(path), seed=seed)

    config = config_for(tmp_path, steps=4)
    assert await outcome(config, tokenizer, FromFile, path.unlink) is None
    assert not path.exists()
    assert_every_reward_is_earned(config)


async def test_a_grader_that_begins_to_lie_is_found_by_its_canaries(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    class Lies(Breaks):
        async def score(self, episode: Episode) -> dict[str, float]:
            return {"correct": 0.0} if self.is_broken else await super().score(episode)

    config = config_for(tmp_path, canary_every=1)
    canaries = Canaries(Lies, make_env=Lies, sandbox=None)
    await canaries.check(when="at the start")
    error = await outcome(config, tokenizer, Lies, partial(setattr, Lies, "is_broken", True), canaries=canaries)
    assert isinstance(error, CanaryFailed) and CANARY.is_in(error)
    assert "the grader gave 0 instead of 1 to '\\\\boxed{033}'" in str(error)
