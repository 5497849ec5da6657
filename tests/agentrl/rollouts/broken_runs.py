"""Whole runs in which a part breaks after the first step, for the tests of infrastructure and environments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from agentrl.config import Config
from agentrl.env import Env, Split
from agentrl.errors import AgentRLError
from agentrl.report.metrics import read
from agentrl.run_folder import EpisodeKind, RunFolder
from agentrl.testing import ScriptedEngine, call
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Message, StopReason, Task, Trajectory
from envs.aime import AimePython
from envs.grading import final_answer
from envs.math_python import Math
from tests.agentrl.training.whole_run import make_config, run_with

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
