"""Episodes of an agent with its own loop: which of them become trajectories, and which get no reward."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from agentrl.chat import agent_runner
from agentrl.config import RolloutConfig
from agentrl.env import Env, Episode, Split, load_env_class
from agentrl.env.agent_env import AgentEnv, Endpoint, run_command
from agentrl.errors import ConfigError, EngineError, EnvError
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Completion, Sampling, StopReason, Task, TrajectoryGroup
from tests.agentrl.rollouts.playing import play_group

TASK = Task(id="t", prompt="What is it?", answer="7")
LIMITS = RolloutConfig(max_context=600, max_turn_tokens=100, episode_timeout_s=20, max_retries=1)

Play = Callable[..., Any]


class Asking(AgentEnv):
    """Asks as often as `script` has questions; a number in it goes back to an earlier point."""

    script: tuple[str, ...] = ("a", "b")
    closed = 0

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return [TASK]

    async def run(self, *, task: Task, endpoint: Endpoint) -> None:
        history: list[Any] = [{"role": "user", "content": task.prompt}]
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            for question in self.script:
                history.append({"role": "user", "content": question})
                answer = await client.chat.completions.create(model=endpoint.model, messages=history)
                history.append(answer.choices[0].message)

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(episode.final_text == episode.task.answer)}

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def play(tokenizer: TurnTokenizer) -> Play:
    async def run(
        make_env: Callable[[], Env],
        script: Any = ("5", "7"),
        *,
        size: int = 1,
        limits: RolloutConfig = LIMITS,
        **options: Any,
    ) -> TrajectoryGroup:
        engine = options.pop("engine", None) or ScriptedEngine(tokenizer=tokenizer, script=script)
        parts = {"engine": engine, "tokenizer": tokenizer, "config": limits, **options}
        return await play_group(make_env, TASK, group_id=3, size=size, **parts)

    return run


async def test_an_agents_episode_is_a_trajectory(play: Play) -> None:
    envs: list[Asking] = []
    group = await play(lambda: envs.append(Asking()) or envs[-1], size=3)
    assert [t.id for t in group.trajectories] == ["train-3-0", "train-3-1", "train-3-2"]
    assert group.rewards_G == [1.0] * 3
    assert [env.closed for env in envs] == [1] * 3
    first = group.trajectories[0]
    assert (first.stop_reason, len(first.turns), first.messages[-1].content) == (StopReason.COMPLETED, 2, "7")
    assert {"calls": 2, "segments": 1, "turns": 2}.items() <= first.info.items()


class Seeds(ScriptedEngine):
    """Keeps the seeds in the order of the calls."""

    seen: list[int | None]

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        self.seen.append(sampling.seed)
        return await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)


async def test_an_agents_calls_have_seeds_that_a_second_play_repeats(play: Play, tokenizer: TurnTokenizer) -> None:
    engine = Seeds(tokenizer=tokenizer, script=("5", "7"))
    engine.seen = []
    for _ in range(2):
        await play(Asking, engine=engine, request_seeds=True)
    first, second = engine.seen[:2], engine.seen[2:]
    assert first == second and len({*first, None}) == 3


class Forking(Asking):
    async def run(self, *, task: Task, endpoint: Endpoint) -> None:
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            for system in ("plan", "act"):
                history: Any = [{"role": "system", "content": system}, {"role": "user", "content": task.prompt}]
                await client.chat.completions.create(model="x", messages=history)


async def test_each_segment_is_a_trajectory_with_the_reward_of_the_whole(play: Play) -> None:
    group = await play(Forking)
    assert [t.id for t in group.trajectories] == ["train-3-0.0", "train-3-0.1"]
    assert group.rewards_G == [1.0, 1.0]
    assert [t.messages[0].content for t in group.trajectories] == ["plan", "act"]
    assert all(t.info["segments"] == 2 and t.info["calls"] == 2 for t in group.trajectories)


class Plain(Asking):
    """A loop that blocks, as most are written."""

    def run(self, *, task: Task, endpoint: Endpoint) -> None:
        with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            for _ in range(2):
                client.chat.completions.create(model="x", messages=[{"role": "user", "content": task.prompt}])


async def test_a_blocking_loop_runs_in_a_thread_of_its_own(play: Play) -> None:
    group = await play(Plain, size=8)
    assert len(group.trajectories) == 16


PROGRAM = """
import os, sys, json, urllib.request as web
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
request = web.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"})
print(json.load(web.urlopen(request))["choices"][0]["message"]["content"])
"""


class Program(AgentEnv):
    """A program in any language: this one speaks plain HTTP."""

    async def run(self, *, task: Task, endpoint: Endpoint) -> None:
        self.said = await run_command([sys.executable, "-c", PROGRAM, task.prompt], endpoint=endpoint)

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(self.said.strip() == episode.task.answer)}


async def test_a_program_is_an_agent(play: Play) -> None:
    group = await play(Program, ["7"], size=2)
    assert group.rewards_G == [1.0, 1.0]


class Failing(Asking):
    """Fails after `answers` answers."""

    def __init__(self, answers: int, error: BaseException) -> None:
        self.script = ("again",) * answers
        self.error = error

    async def run(self, *, task: Task, endpoint: Endpoint) -> None:
        await super().run(task=task, endpoint=endpoint)
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("agent bug"), SystemExit(3), asyncio.CancelledError()])
async def test_an_agent_that_fails_is_tried_again_and_never_scored(play: Play, error: BaseException) -> None:
    envs = [Failing(1, error), Asking()]
    tries = iter(envs)
    group = await play(lambda: next(tries))
    assert [t.reward for t in group.trajectories] == [1.0]
    assert [env.closed for env in envs] == [1, 1]
    with pytest.raises(EnvError):
        await play(lambda: Failing(1, error))


async def test_an_agent_that_asks_nothing_is_told_where_its_model_is(play: Play) -> None:
    class Silent(Asking):
        script = ()

    with pytest.raises(EnvError, match=r"endpoint\.base_url"):
        await play(Silent)


async def test_an_engine_that_fails_is_no_reward_even_if_the_agent_hides_it(play: Play) -> None:
    class Hiding(Asking):
        async def run(self, *, task: Task, endpoint: Endpoint) -> None:
            try:
                await super().run(task=task, endpoint=endpoint)
            except Exception:
                await asyncio.sleep(60)

    started = time.monotonic()
    with pytest.raises(EngineError, match="the script has 1 turns"):
        await play(Hiding, ["only one"])
    assert time.monotonic() - started < 10


async def test_an_agent_that_gives_up_for_the_context_has_come_to_an_end(play: Play) -> None:
    class Talking(Asking):
        script = ("word " * 40,) * 20

    group = await play(Talking, lambda prompt: "7")
    (episode,) = group.trajectories
    assert (episode.stop_reason, episode.reward) == (StopReason.MAX_CONTEXT, 1.0)
    assert 1 < len(episode.turns) < 20
    assert len(episode.token_ids()) <= LIMITS.max_context


async def test_an_agent_that_makes_do_with_less_context_has_completed(play: Play) -> None:
    class Compacting(Asking):
        script = ("word " * 300,)

        async def run(self, *, task: Task, endpoint: Endpoint) -> None:
            with pytest.raises(BadRequestError):
                await super().run(task=task, endpoint=endpoint)
            self.script = ("short",)
            await super().run(task=task, endpoint=endpoint)

    group = await play(Compacting, lambda prompt: "7")
    assert group.trajectories[0].stop_reason is StopReason.COMPLETED


async def test_a_first_prompt_that_does_not_fit_is_the_users_to_mend(play: Play) -> None:
    class Long(Asking):
        script = ("word " * 600,)

    with pytest.raises(ConfigError, match=r"task t: .*rollout.max_context"):
        await play(Long)


async def test_calls_are_counted(play: Play) -> None:
    class Endless(Asking):
        script = ("again",) * 100

    group = await play(Endless, lambda prompt: "7", max_turns=3)
    assert group.trajectories[0].stop_reason is StopReason.MAX_TURNS
    assert len(group.trajectories[0].turns) == 3


class Slow(Asking):
    async def run(self, *, task: Task, endpoint: Endpoint) -> None:
        await super().run(task=task, endpoint=endpoint)
        await asyncio.sleep(60)


async def test_time_ends_an_episode_with_what_was_answered(play: Play) -> None:
    group = await play(Slow, limits=LIMITS.model_copy(update={"episode_timeout_s": 1.0}))
    assert group.trajectories[0].stop_reason is StopReason.TIMEOUT
    assert len(group.trajectories[0].turns) == 2


async def test_an_episode_without_an_answer_in_time_is_whoevers_fault_it_was(
    play: Play, tokenizer: TurnTokenizer
) -> None:
    limits = LIMITS.model_copy(update={"episode_timeout_s": 0.5, "max_retries": 0})

    class Idle(Asking):
        async def run(self, *, task: Task, endpoint: Endpoint) -> None:
            await asyncio.sleep(60)

    with pytest.raises(EnvError, match="asked for none"):
        await play(Idle, limits=limits)
    with pytest.raises(EngineError, match="no turn was generated"):
        await play(Asking, engine=ScriptedEngine(tokenizer=tokenizer, script=["x"], latency_s=60), limits=limits)


async def test_an_agent_that_swallows_its_cancellation_is_abandoned(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_runner, "AGENT_END_TIMEOUT_S", 0.2)
    released = asyncio.Event()

    class Stubborn(Asking):
        async def run(self, *, task: Task, endpoint: Endpoint) -> None:
            await super().run(task=task, endpoint=endpoint)
            while not released.is_set():
                try:
                    await released.wait()
                except asyncio.CancelledError:
                    continue

    group = await play(Stubborn, limits=LIMITS.model_copy(update={"episode_timeout_s": 1.0}))
    released.set()
    assert group.trajectories[0].stop_reason is StopReason.TIMEOUT
    assert "it is abandoned" in caplog.text


async def test_cancelling_a_group_ends_its_agents_and_their_calls(play: Play, tokenizer: TurnTokenizer) -> None:
    started: list[str] = []
    stopped: list[str] = []

    class Hanging(ScriptedEngine):
        async def generate(
            self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
        ) -> Completion:
            started.append(request_id)
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                stopped.append(request_id)
                raise
            raise AssertionError

    envs: list[Asking] = []
    engine = Hanging(tokenizer=tokenizer, script=[])
    group = asyncio.create_task(play(lambda: envs.append(Asking()) or envs[-1], size=2, engine=engine))
    while len(started) < 2:
        await asyncio.sleep(0.01)
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await group
    assert sorted(stopped) == ["train-3-0-0-0", "train-3-1-0-0"]
    assert [env.closed for env in envs] == [1, 1]


ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", api_key="sk-secret", model="policy")


async def test_the_group_of_a_program_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    script = f"sleep 300 & echo $! > {mark}; wait"
    running = asyncio.create_task(run_command(["sh", "-c", script], endpoint=ENDPOINT))
    async with asyncio.timeout(10):
        while not mark.exists() or not mark.read_text().strip():
            await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    pid = int(mark.read_text())
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


async def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"exit code 3.*\n.*no such luck"):
        await run_command(["sh", "-c", "echo no such luck >&2; exit 3"], endpoint=ENDPOINT)
    with pytest.raises(EnvError, match="not found"):
        await run_command(["no-such-program"], endpoint=ENDPOINT)


async def test_what_a_program_writes_comes_back_from_its_folder(tmp_path: Path) -> None:
    command = ["sh", "-c", "pwd; echo $COLOUR; echo noise >&2"]
    assert await run_command(command, endpoint=ENDPOINT, cwd=tmp_path, env={"COLOUR": "red"}) == f"{tmp_path}\nred\n"


def test_an_endpoint_shows_no_key() -> None:
    assert "sk-secret" not in repr(ENDPOINT)


def test_an_agent_env_without_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from agentrl.env.agent_env import AgentEnv\nclass Mine(AgentEnv):\n    pass\n")
    with pytest.raises(ConfigError, match="does not define run"):
        load_env_class(f"{tmp_path}/mine.py:Mine")
