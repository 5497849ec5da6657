"""Plays the gold answer, a wrong answer and the demonstration of every task. Independent of the other checks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from agentrl.check.report import Finding, Hung, OnProgress, ignore
from agentrl.env import Env, Episode, checked_script, places
from agentrl.errors import AgentRLError, raise_first
from agentrl.tools import is_tool
from agentrl.types import Message, StopReason, Task

NUM_CONCURRENT = 16
MAX_FAILURES = 20
"""After this many failed rows the rest is not played."""
MAX_SHOWN = 3
NUM_DEMONSTRATED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The checks that play every task.

    detail = await Answers(env_cls=Capitals, play=play, script=script, progress=ignore).gold_and_wrong(tasks)
    """

    env_cls: type[Env]
    play: Callable[[Task, Sequence[Message]], Awaitable[Episode]]
    script: Callable[[str], Sequence[Message]]
    """What is said to give an answer."""
    progress: OnProgress

    async def demonstrations(self, tasks: Sequence[Task]) -> str:
        """The demonstrations score 1.0. Raises Finding."""
        scripts = [(task, checked_script(self.env_cls, task)) for task in tasks[:NUM_DEMONSTRATED]]
        offered = {task.id: script for task, script in scripts if script is not None}
        if not offered:
            return "none offered (`demonstrations` is needed for a warm start only)"

        self._require_tools(offered.values())

        async def expert(task: Task) -> str | None:
            episode = await self.play(task, offered[task.id])
            if episode.stop_reason is not StopReason.COMPLETED:
                return f"the demonstration's episode ended as {_ending(episode, self.env_cls)}"
            return None if _correct(episode) >= 1.0 else f"the demonstration scored {_correct(episode):g}, not 1"

        await self._for_each([task for task in tasks if task.id in offered], expert, ignore)
        return f"score 1 on {_tasks(len(offered))}"

    def _require_tools(self, scripts: Iterable[Sequence[Message]]) -> None:
        """Raises Finding where a demonstration calls a method that is not offered to the model."""
        names = {call.name for script in scripts for message in script for call in message.tool_calls}
        for name in sorted(names):
            method = getattr(self.env_cls, name, None)
            if callable(method) and name not in self.env_cls.tools and not is_tool(method):
                place = places.in_brackets(places.defined_at(method))
                raise Finding(f"they call {name}, which is a method and no tool: write @tool above it{place}")

    async def gold_and_wrong(self, tasks: Sequence[Task]) -> str:
        """Each gold answer scores 1.0 and a wrong one 0.0; where rewards leave [0, 1], more. Raises Finding."""
        with_answer = [task for task in tasks if task.answer is not None]
        if not with_answer:
            return "not checked: the tasks have no `answer`"
        score, phrase = (places.in_brackets(places.defined_at(f)) for f in (self.env_cls.score, self.env_cls.phrase))

        async def row(task: Task) -> str | None:
            gold = task.answer or ""
            right, bad = self.script(gold), wrong_answer(gold)
            episode = await self.play(task, right)
            high = _correct(episode)
            if 0.0 <= high < 1.0:
                said = f"the gold answer, said as {right[-1].content!r}, scored {high:g}, not 1: "
                if episode.stop_reason is StopReason.MAX_TURNS:
                    return f"{said}the episode ended as {_ending(episode, self.env_cls)}"
                return f"{said}change score{score} or phrase{phrase}"
            low = _correct(await self.play(task, self.script(bad)))
            if low == 0.0 or (not 0.0 <= low <= high <= 1.0 and low < high):
                return None
            return f"the wrong answer {bad!r} scored {low:g} (gold {gold!r} scored {high:g}): change score{score}"

        await self._for_each(with_answer, row, self.progress)
        unanswered = len(tasks) - len(with_answer)
        rest = f"; {_tasks(unanswered)} without `answer` not checked" if unanswered else ""
        return f"the gold answer scores 1 and a wrong one 0 on {_tasks(len(with_answer))}{rest}"

    async def _for_each(
        self, tasks: Sequence[Task], judge: Callable[[Task], Awaitable[str | None]], progress: OnProgress
    ) -> None:
        """Raises Finding with the rows that `judge` fails; stops when MAX_FAILURES rows have failed."""
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
                except Hung:
                    raise
                except AgentRLError as error:
                    problem = " ".join(str(error).split())
                if problem is not None:
                    failures.append(f"{task.id}: {problem}")
                num_done += 1
                progress(num_done, len(tasks))

        try:
            async with asyncio.TaskGroup() as tg:
                for _ in range(min(NUM_CONCURRENT, len(tasks))):
                    tg.create_task(worker())
        except BaseExceptionGroup as group:
            raise_first(group)
        if failures:
            raise Finding(_summary(failures, len(tasks)))


def wrong_answer(gold: str) -> str:
    """An answer of the same kind that is not `gold`."""
    if re.fullmatch("[+-]?[0-9]+", gold):
        return str(int(gold) + 1 if int(gold) != 999 else 0)
    return "-98765.4321"


def _summary(failures: Sequence[str], num_rows: int) -> str:
    if num_rows == 1:
        return f"task {failures[0]}"
    more = "" if len(failures) <= MAX_SHOWN else f"\n  ... and {len(failures) - MAX_SHOWN} more"
    stopped = " (the rest was not played)" if len(failures) >= MAX_FAILURES else ""
    shown = "".join(f"\n  task {failure}" for failure in failures[:MAX_SHOWN])
    return f"{len(failures)} of {_tasks(num_rows)} fail{stopped}:{shown}{more}"


def _ending(episode: Episode, env_cls: type[Env]) -> str:
    if episode.stop_reason is StopReason.MAX_TURNS:
        return f"{episode.stop_reason}: raise {env_cls.__name__}.max_turns, now {env_cls.max_turns}"
    return str(episode.stop_reason)


def _correct(episode: Episode) -> float:
    """The reward for a right answer: the one named `correct` if there is one, else the total."""
    return episode.rewards.get("correct", episode.reward)


def _tasks(count: int) -> str:
    return f"{count} {'task' if count == 1 else 'tasks'}"
