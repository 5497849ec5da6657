import asyncio
import contextlib
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from agentrl.check import CheckReport, check_env, wrong_answer
from agentrl.check import cancellation as check_cancel
from agentrl.check.token_record import _broken_prefix
from agentrl.env import Action, Env, Episode, Split, StepResult, ToolEnv
from agentrl.env.agent_env import AgentEnv, Endpoint
from agentrl.tools import tool
from agentrl.types import Completion, FinishReason, Message, StopReason, Task, Trajectory, Turn, VersionSpan, user
from envs.grading import final_answer
from sandbox.client import SandboxClient


class Good(ToolEnv):
    """Boxed integers, echoing tool; each subclass below breaks one promise."""

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return [Task(id=f"row-{i}", prompt="Count.", answer=str(i)) for i in range(30)]

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    @tool
    async def echo(self, text: str) -> str:
        """Say it again."""
        await asyncio.sleep(0)
        return text

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(final_answer(episode.final_text) == episode.task.answer)}

    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message] | None:
        return [Message(role="assistant", content=f"\\boxed{{{task.answer}}}")]


class GradesByPrefix(Good):
    async def score(self, episode: Episode) -> dict[str, float]:
        answer = final_answer(episode.final_text) or ""
        return {"correct": float(answer.startswith((episode.task.answer or "")[:1]))}


class NeverRight(Good):
    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": 0.0}


class Unbounded(Good):
    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": 100 * (await super().score(episode))["correct"]}


class Moody(Good):
    moods = itertools.count()

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(f"{task.prompt} {next(self.moods)}")], {}


class SwallowsCancel(Good):
    @tool
    async def echo(self, text: str) -> str:
        """Say it again."""
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            return "never mind"
        return text


class SwallowsOpening(Good):
    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.001)
        return await super().reset(task=task, seed=seed)


class FailsWhenCancelled(Good):
    @tool
    async def echo(self, text: str) -> str:
        """Say it again."""
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise OSError("connection lost") from None
        return text


class AnswersForTheModel(Good):
    async def step(self, action: Action) -> StepResult:
        return (await super().step(action))._replace(observation=[Message(role="assistant", content="I am you.")])


class HandWrittenSchema(Good):
    @classmethod
    def tool_schemas(cls) -> list[dict[str, Any]]:
        parameters = {"type": "object", "properties": {"text": {"type": "words"}}}
        return [{"type": "function", "function": {"name": "echo", "description": "Echo.", "parameters": parameters}}]


class NamelessTool(Good):
    @classmethod
    def tool_schemas(cls) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "say it", "description": "Echo."}}]


class OtherRowsEachTime(Good):
    number = itertools.count()

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return [Task(id=str(next(cls.number)), prompt="Count.", answer="1")]


class NeverCloses(Good):
    async def close(self) -> None:
        raise RuntimeError("stuck")


class EndsOnBadCalls(Good):
    async def step(self, action: Action) -> StepResult:
        return (await super().step(action))._replace(terminated=True)


class BadExpert(Good):
    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message] | None:
        return [Message(role="assistant", content="no idea")]


class BreaksOnRowSeven(Good):
    async def score(self, episode: Episode) -> dict[str, float]:
        if episode.task.id == "row-7":
            raise RuntimeError("grader")
        return await super().score(episode)


class Empty(Good):
    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return []


class Twice(Good):
    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return [*super().tasks(split), Task(id="row-3", prompt="x", answer="1")]


class NoAnswers(Good):
    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return (Task(id=str(i), prompt="Talk.") for i in itertools.count())

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": 1.0}


async def check(cls: type[Env], **options: Any) -> CheckReport:
    return await check_env(cls, data=None, sandbox=None, **options)


async def test_a_good_environment_passes_and_reports_progress() -> None:
    seen: list[tuple[int, int]] = []
    report = await check(Good, progress=lambda done, total: seen.append((done, total)))
    assert report.ok, report
    assert report.checks[-1].detail == "the gold answer scores 1 and a wrong one 0 on 30 tasks"
    assert seen == [(i, 30) for i in range(1, 31)]


@pytest.mark.parametrize(
    ("cls", "failing", "detail"),
    [
        (GradesByPrefix, "answers", r"task row-\d+: the wrong answer"),
        (NeverRight, "answers", "the rest was not played"),
        (Moody, "repeatable", "different messages"),
        (SwallowsCancel, "clean-up", "swallowed"),
        (NeverCloses, "one turn", r"NeverCloses.close: RuntimeError: stuck \(\S*test_check_env.py:\d+\)"),
        (SwallowsOpening, "clean-up", r"swallowed the cancellation \(cancelled at await 2 of 7"),
        (FailsWhenCancelled, "clean-up", "came out as ToolBroken: tool echo: OSError"),
        (AnswersForTheModel, "one turn", r"step answered as \['assistant'\]"),
        (HandWrittenSchema, "tools", "the parameters of echo are not a JSON schema: 'words'"),
        (NamelessTool, "tools", "'say it' is not a name"),
        (OtherRowsEachTime, "tasks", "other tasks at the second call"),
        (EndsOnBadCalls, "wrong calls", "ends the episode"),
        (BadExpert, "demonstrations", "the demonstration scored 0"),
        (BreaksOnRowSeven, "demonstrations", r"1 of 30 tasks fail:\n  task row-7: BreaksOnRowSeven.score"),
        (Empty, "tasks", "gives no tasks"),
        (Twice, "tasks", "the id 'row-3' is used twice"),
    ],
)
async def test_a_broken_promise_is_found(cls: type[Env], failing: str, detail: str) -> None:
    report = await check(cls)
    assert not report.ok
    findings = {check.name: check.detail for check in report.checks if not check.ok}
    assert failing in findings
    assert re.search(detail, findings[failing]), findings


async def test_every_await_of_a_good_environment_is_tried() -> None:
    (cancel,) = (check for check in (await check(Good)).checks if check.name == "clean-up")
    assert cancel.detail == "closed after a cancellation at each of 6 awaits of reset, step, score and close"


class Leaky(Good):
    """Closes its session, but not when it is cancelled."""

    @tool
    async def echo(self, text: str) -> str:
        """Say it again."""
        session = await self.sandbox.open_session()
        await asyncio.sleep(0)
        await session.close()
        return text


async def test_sessions_that_cancelled_episodes_leave_open_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_cancel, "LEFT_OPEN_S", 0.2)
    async with SandboxClient.embedded("unsafe", allow_unsafe=True) as sandbox:
        report = await check_env(Leaky, data=None, sandbox=sandbox, limit=1)
    findings = [check.detail for check in report.checks if not check.ok]
    assert findings == ["1 sandbox sessions are left open by cancelled episodes"]


def spoken(*turns: tuple[list[int], list[int]]) -> Trajectory:
    """One trajectory of (observation, action) ids."""
    return Trajectory(
        id="t",
        task_id="t",
        turns=tuple(
            Turn(
                observation_ids=tuple(seen),
                completion=Completion(
                    token_ids=tuple(said),
                    behavior_logprobs=(-0.5,) * len(said),
                    version_spans=(VersionSpan(version=0, start=0, end=len(said)),),
                    finish_reason=FinishReason.STOP,
                ),
            )
            for seen, said in turns
        ),
        messages=(),
        reward=0.0,
        rewards={},
        stop_reason=StopReason.COMPLETED,
    )


@pytest.mark.parametrize(
    ("second_prompt", "is_broken"), [([1, 2, 3, 4], False), ([1, 2, 9, 4], True), ([1, 2, 4], True)]
)
def test_a_prompt_that_is_no_continuation_is_found(second_prompt: list[int], is_broken: bool) -> None:
    problem = _broken_prefix([spoken(([1, 2], [3]), ([4], [5]))], [[1, 2], second_prompt])
    assert (problem is not None) == is_broken


class BringsItsOwnLoop(AgentEnv):
    """Never asked here."""

    tasks = Good.tasks

    async def run(self, *, task: Task, endpoint: Endpoint) -> None:
        raise AssertionError("no check can play it")

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": 1.0}


async def test_an_agent_with_its_own_loop_is_checked_as_far_as_it_can_be() -> None:
    report = await check(BringsItsOwnLoop)
    assert report.ok
    assert "agentrl eval" in report.checks[-1].detail


async def test_tasks_without_answers_are_said_to_be_unchecked() -> None:
    report = await check(NoAnswers, limit=5)
    assert "not checked: the tasks have no `answer`" in report.checks[-1].detail


@pytest.mark.parametrize(("gold", "wrong"), [("7", "8"), ("999", "0"), ("-1", "0"), ("x", "-98765.4321")])
def test_the_wrong_answer_is_of_the_same_kind(gold: str, wrong: str) -> None:
    assert wrong_answer(gold) == wrong
