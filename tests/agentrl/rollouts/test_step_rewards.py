"""Rewards of single turns on their way: environment, rollout, batch, metrics, report."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from agentrl.config import RolloutConfig
from agentrl.env import Action, Env, Episode, StepResult
from agentrl.report.metrics import MetricsLog, rollout_metrics
from agentrl.rollouts.episode import PlayedEpisode, SegmentRecord, with_turn_rewards
from agentrl.run_folder import RunFolder
from agentrl.testing import ScriptedEngine, completion
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training import learner_api as api
from agentrl.types import Batch, Message, Task, TrajectoryGroup, Turn, user
from agentrl.view.documents import summary
from agentrl.view.run_reader import RunReader
from tests.agentrl.report.synthetic_run import make_config
from tests.agentrl.rollouts.playing import play_group


class Counter(Env):
    """A quarter for every turn, one for the end."""

    reward_weights: ClassVar = {"correct": 1.0, "step": 2.0}

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    async def step(self, action: Action) -> StepResult:
        is_last = action.message.content == "three"
        return StepResult([] if is_last else [user("more")], 0.25, is_last, False, {})

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": 1.0}


async def play(tokenizer: TurnTokenizer) -> TrajectoryGroup:
    engine = ScriptedEngine(tokenizer=tokenizer, script=["one", "two", "three"])
    task = Task(id="t", prompt="Count.")
    limits = RolloutConfig(max_context=400, max_turn_tokens=64, tool_output_tokens=16)
    return await play_group(Counter, task, group_id=0, size=2, engine=engine, tokenizer=tokenizer, config=limits)


async def test_they_are_weighted_into_what_the_learner_is_sent(tokenizer: TurnTokenizer) -> None:
    group = await play(tokenizer)
    batch = Batch(policy_version=0, max_lag=0, groups=(group,))
    received = api.decode(api.encode(batch), Batch)
    for trajectory in received.trajectories():
        assert trajectory.rewards == {"correct": 1.0, "step": 0.75}
        assert [turn.reward for turn in trajectory.turns] == [0.5, 0.5, 0.5], "weighted, as in the episode's reward"
        assert trajectory.reward == 1.0 + 2.0 * 0.75


def test_each_turn_gets_its_own_and_the_model_s_own_notes_get_none() -> None:
    turn = Turn(observation_ids=(1,), completion=completion((3,), (-0.5,), 0))
    segments = tuple(SegmentRecord(turns=(turn,) * number, messages=()) for number in (3, 2))
    played = PlayedEpisode(messages=(), segments=segments, counts={}, step_rewards=(1.0, 0.0, 3.0))

    def rewards(has_notes: bool) -> list[list[float]]:
        found = with_turn_rewards(played, 0.5, has_notes=has_notes)
        return [[one.reward for one in segment.turns] for segment in found.segments]

    assert rewards(has_notes=True) == [[0.5, 0.0, 0.0], [1.5, 0.0]]  # the deadline cut the last turn off
    assert rewards(has_notes=False) == [[0.5, 0.0, 1.5], [0.0, 0.0]]
    plain = replace(played, step_rewards=(0.0, 0.0))
    assert with_turn_rewards(plain, 0.5, has_notes=True) is plain


async def test_they_have_a_curve_and_stand_beside_their_episode(tokenizer: TurnTokenizer, tmp_path: Path) -> None:
    group = await play(tokenizer)
    folder = RunFolder.create(tmp_path, "run", config=make_config())
    with MetricsLog(folder) as metrics:
        metrics.log("step", 1, rollout_metrics([group]))
    folder.write_trajectories(1, [group])
    assert folder.read_trajectories(1) == [group], "with the rewards of its turns"
    reader = RunReader(folder)
    assert rollout_metrics([group])["rollout/reward_step"] == 0.75
    assert summary(reader)["charts"][0].title == "Rewards by name"
    assert {tuple(row.rewards.items()) for row in reader.index.episodes()} == {(("correct", 1.0), ("step", 0.75))}
