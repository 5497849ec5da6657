"""Rewards of single turns on their way: environment, rollout, batch, metrics, report."""

from pathlib import Path
from typing import Any, ClassVar

from agentrl.config import RolloutConfig
from agentrl.env import Action, Env, Episode, StepResult
from agentrl.report.metrics import MetricsLog, rollout_metrics
from agentrl.run_folder import RunFolder
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training import learner_api as api
from agentrl.types import Batch, Message, Task, TrajectoryGroup, user
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
        assert trajectory.reward == 1.0 + 2.0 * 0.75


async def test_they_have_a_curve_and_stand_beside_their_episode(tokenizer: TurnTokenizer, tmp_path: Path) -> None:
    group = await play(tokenizer)
    folder = RunFolder.create(tmp_path, "run", config=make_config())
    with MetricsLog(folder) as metrics:
        metrics.log("step", 1, rollout_metrics([group]))
    folder.write_trajectories(1, [group])
    reader = RunReader(folder)
    assert rollout_metrics([group])["rollout/reward_step"] == 0.75
    assert summary(reader)["charts"][0].title == "Rewards by name"
    assert {tuple(row.rewards.items()) for row in reader.index.episodes()} == {(("correct", 1.0), ("step", 0.75))}
