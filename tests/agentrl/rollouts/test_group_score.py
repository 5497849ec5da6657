"""Rewards of a whole group: `score_group`, from the environment's return value to the records that are trained on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest

from agentrl.config import RolloutConfig
from agentrl.env import Action, Env, Episode, StepResult, group_scored, opened
from agentrl.env.agent_env import AgentEnv, Endpoint
from agentrl.errors import EnvError, SandboxError
from agentrl.rollouts.episode import FinishedEpisode
from agentrl.rollouts.monitored_env import monitored
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.testing import ScriptedEngine, episode_of, trajectory
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Message, StopReason, Task, TrajectoryGroup, user
from agentrl.wrappers import RewardScale, Wrapper
from sandbox.client import SandboxUnavailable
from tests.agentrl.rollouts.playing import play_group

TASK = Task(id="t", prompt="Say.", answer="yes")
SAID = ("yes", "no", "yes, answer")
RANKS = [{"rank": 1.0}, {"rank": 0.0}, {"rank": 0.5}]


class Ranked(Env):
    """Half a point for a good place in its group. Notes what it was called with."""

    reward_weights: ClassVar = {"correct": 1.0, "rank": 0.5, "step": 1.0}
    log: ClassVar[list[Any]]
    returned: ClassVar[Callable[[], Any]]

    @classmethod
    @asynccontextmanager
    async def open_shared(cls) -> AsyncIterator[str]:
        yield "a judge"

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        self.log.append("reset")
        return [user(task.prompt)], {}

    async def step(self, action: Action) -> StepResult:
        return StepResult([], 0.25, True, False, {})

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(episode.final_text.startswith("yes"))}

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[dict[str, float]]:
        self.log.append(("score_group", self.shared, [(one.final_text, dict(one.rewards)) for one in episodes]))
        return type(self).returned()

    async def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def ranked() -> type[Ranked]:
    """A class of this test's own."""

    class Mine(Ranked):
        log: ClassVar[list[Any]] = []
        returned: ClassVar = staticmethod(lambda: RANKS)

    return Mine


def engine_of(tokenizer: TurnTokenizer) -> ScriptedEngine:
    """Says SAID, member by member."""
    said = iter(SAID)
    return ScriptedEngine(tokenizer=tokenizer, script=lambda prompt: next(said))


async def play(make_env: Callable[[], Env], engine: ScriptedEngine, **rollout: Any) -> TrajectoryGroup:
    limits = RolloutConfig(max_context=400, max_turn_tokens=64, tool_output_tokens=16, **rollout)
    return await play_group(make_env, TASK, engine=engine, tokenizer=engine.tokenizer, config=limits, size=len(SAID))


async def test_the_group_is_scored_once_after_its_last_episode_and_its_rewards_are_trained_on(
    ranked: type[Ranked], tokenizer: TurnTokenizer
) -> None:
    async with opened(ranked) as make_env:
        group = await play(monitored(make_env, WaitGraph()), engine_of(tokenizer))
    ((_, shared, seen),) = (entry for entry in ranked.log if entry[0] == "score_group")
    assert shared == "a judge"
    members = {one.messages[-1].content: one for one in group.trajectories}
    assert sorted(text for text, _ in seen) == sorted(SAID)
    assert [text for text, _ in seen] == [one.messages[-1].content for one in group.trajectories]
    assert all(rewards == {"correct": float(text != "no"), "step": 0.25} for text, rewards in seen)
    for (text, scored), added in zip(seen, RANKS, strict=True):
        assert members[text].rewards == {**scored, **added}
        assert members[text].reward == scored["correct"] + 0.25 + 0.5 * added["rank"]
    # The object that scores plays nothing and is closed, after all others.
    assert (ranked.log.count("reset"), ranked.log.count("close")) == (3, 4)
    assert ranked.log.index(("score_group", shared, seen)) == len(ranked.log) - 2


WRONG = {
    "nothing": (lambda: None, r"score_group returned None: return a list of named rewards: .*test_group_score\.py:\d+"),
    "short": (lambda: RANKS[:2], r"score_group returned 2 rewards for 3 episodes: return one dict for each episode"),
    "bare": (lambda: [1.0, 0.0, 0.5], r"score_group \(episode 1 of 3\) returned 1\.0 \(float\): return a dict"),
    "nan": (
        lambda: [*RANKS[:2], {"rank": float("nan")}],
        r"score_group \(episode 3 of 3\) returned rank=nan: it must be finite",
    ),
    "text": (
        lambda: [*RANKS[:2], {"rank": "high"}],
        r"score_group \(episode 3 of 3\): the reward 'rank' is 'high' \(str\): return a number",
    ),
    "unknown": (
        lambda: [{"place": 1.0}] * 3,
        r"score_group \(episode 1 of 3\) returned 'place\', which reward_weights does not name",
    ),
    "missing": (
        lambda: [*RANKS[:2], {}],
        r"score_group \(episode 3 of 3\) lacks \['rank'\], which reward_weights names",
    ),
    "twice": (
        lambda: [{"correct": 1.0, "rank": 1.0}] * 3,
        r"score_group \(episode 1 of 3\) has \['correct'\], which `score` gave already",
    ),
    "raises": (lambda: RANKS[9], r"score_group of task t: IndexError: .*test_group_score\.py:\d+"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_wrong_is_one_error_after_the_retries_and_no_group(
    name: str, ranked: type[Ranked], tokenizer: TurnTokenizer
) -> None:
    returned, said = WRONG[name]
    ranked.returned = staticmethod(returned)
    engine = engine_of(tokenizer)
    async with opened(ranked) as make_env:
        with pytest.raises(EnvError, match=rf"(?s)Mine\.{said}"):
            await play(make_env, engine, max_retries=1)
    assert [entry[0] for entry in ranked.log].count("score_group") == 2
    assert len(engine.prompts) == ranked.log.count("reset") == len(SAID)  # no episode was played again


async def test_a_failure_that_passes_is_counted_and_keeps_the_episodes(
    ranked: type[Ranked], tokenizer: TurnTokenizer
) -> None:
    failures = [SandboxUnavailable("down")]

    def returned() -> Any:
        if failures:
            raise failures.pop()
        return RANKS

    ranked.returned = staticmethod(returned)
    async with opened(ranked) as make_env:
        group = await play(make_env, engine_of(tokenizer), max_retries=1)
        failures.append(SandboxUnavailable("down"))
        with pytest.raises(SandboxError, match="score_group of task t: SandboxUnavailable: down"):
            await play(make_env, engine_of(tokenizer), max_retries=0)
    assert [one.info["retries"] for one in group.trajectories] == [1.0] * 3
    assert [one.rewards["rank"] for one in group.trajectories] == [1.0, 0.0, 0.5]


async def test_one_that_hangs_is_ended_by_the_deadline() -> None:
    class Hangs(Ranked):
        async def score_group(self, episodes: Sequence[Episode]) -> Sequence[dict[str, float]]:
            await asyncio.Event().wait()
            return []

    with pytest.raises(EnvError, match=r"Hangs\.score_group of task t: took more than 0\.01 s"):
        await group_scored(Hangs(), [episode("yes")], timeout_s=0.01)


def episode(text: str, **rewards: float) -> Episode:
    return Episode(
        task=TASK,
        messages=(user("Say."), Message(role="assistant", content=text)),
        stop_reason=StopReason.COMPLETED,
        rewards=rewards,
        reward=sum(rewards.values()),
    )


def test_every_segment_has_the_rewards_of_the_group_and_keeps_its_punishment() -> None:
    """Two segments, punished by 0.5 for their length; the group adds 0.25."""
    segments = [replace(trajectory(f"e.{i}", [], reward=0.5), rewards={"correct": 1.0, "overlong": -0.5}) for i in "01"]
    before = episode("yes", correct=1.0)
    after = replace(before, rewards={"correct": 1.0, "rank": 0.5}, reward=1.25)
    finished = FinishedEpisode(episode=before, record=episode_of(*segments)).with_group_rewards(after)
    assert [one.reward for one in finished.record.segments] == [0.75, 0.75]
    assert finished.record.segments[1].rewards == {"correct": 1.0, "overlong": -0.5, "rank": 0.5}


class Longest(Wrapper):
    """A wrapper that scores groups, around an environment that does not."""

    @property
    def reward_weights(self) -> dict[str, float]:  # type: ignore[override]
        return {**self.env.reward_weights, "long": 1.0}

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[dict[str, float]]:
        longest = max(len(one.final_text) for one in episodes)
        return [{"long": float(len(one.final_text) == longest)} for one in episodes]


class Plain(Ranked):
    """No rewards of its group."""

    reward_weights: ClassVar = {"correct": 1.0}
    log: ClassVar[list[Any]] = []
    score_group = Env.score_group


async def test_wrappers_weigh_group_rewards_forward_them_and_may_add_them(
    ranked: type[Ranked], tokenizer: TurnTokenizer
) -> None:
    async with opened(ranked, wrappers=[partial(RewardScale, scale={"rank": 4.0})]) as make_env:
        scaled = await play(make_env, engine_of(tokenizer))
    assert [one.reward - one.rewards["correct"] - 0.25 for one in scaled.trajectories] == [2.0, 0.0, 1.0]
    async with opened(Plain, wrappers=[Longest, Wrapper]) as make_env:
        added = await play(make_env, engine_of(tokenizer))
    assert {one.messages[-1].content: one.rewards["long"] for one in added.trajectories} == dict(
        zip(SAID, (0.0, 0.0, 1.0), strict=True)
    )


async def test_an_environment_without_it_makes_no_further_object(tokenizer: TurnTokenizer) -> None:
    made: list[Env] = []

    def make_env() -> Env:
        made.append(Plain())
        return made[-1]

    await play(make_env, engine_of(tokenizer))
    assert len(made) == len(SAID)
    assert [one.scores_groups for one in (Plain(), Longest(Plain()), Wrapper(Plain()))] == [False, True, False]


async def test_the_group_of_an_agent_is_scored_without_async_too() -> None:
    class Agent(AgentEnv):
        reward_weights: ClassVar = {"rank": 1.0}

        async def run(self, *, task: Task, endpoint: Endpoint) -> None: ...

        def score_group(self, episodes: Sequence[Episode]) -> Any:
            return [{"rank": float(number)} for number, _ in enumerate(episodes)]

    scored = await group_scored(Agent(), [episode("yes"), episode("no")])
    assert [one.reward for one in scored] == [0.0, 1.0]
