"""What `agentrl doctor` asks, in which order, and what comes of it: one finding a line, whatever a check does.

Knows no single check: those of the machine are cli/doctor/machine.py's and cli/doctor/packages.py's, those of a config
cli/doctor/run.py's, and the engine beside the learner is cli/doctor/deep.py's.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from agentrl.errors import AgentRLError
from agentrl.supervision.threads import in_thread

DEADLINE_S = 60.0  # a second on an idle machine; a busy one is no failure
MAX_CHARACTERS = 500  # of a reason: a library's error may be a page


class FindingStatus(StrEnum):
    """What a finding means for a run."""

    OK = "OK"
    WARN = "WARN"
    """It will run, and something may surprise."""
    FAIL = "FAIL"
    """It will not run, or not be what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the answer. Raises ValueError for a complaint without its mend."""

    name: str
    status: FindingStatus
    found: str
    mend: str = ""
    """What to do about it; empty where all is well."""

    def __post_init__(self) -> None:
        if bool(self.mend) == (self.status is FindingStatus.OK):
            raise ValueError(f"{self.name}: {self.status} and mend={self.mend!r} do not go together")


def ok(name: str, found: str) -> Finding:
    """All is well."""
    return Finding(name=name, status=FindingStatus.OK, found=found)


def warn(name: str, found: str, mend: str) -> Finding:
    """It will run all the same."""
    return Finding(name=name, status=FindingStatus.WARN, found=found, mend=mend)


def fail(name: str, found: str, mend: str) -> Finding:
    """It will not run."""
    return Finding(name=name, status=FindingStatus.FAIL, found=found, mend=mend)


Findings = Finding | Sequence[Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question, and how long its answer may take. `ask` runs in a thread where it is no coroutine function."""

    name: str
    ask: Callable[[], Findings] | Callable[[], Awaitable[Findings]]
    deadline_s: float = DEADLINE_S


async def examine(checks: Sequence[Check], *, on_done: Callable[[str], None] = lambda name: None) -> list[Finding]:
    """Ask all at once; the findings come in the order of the checks. Never raises for what a check does."""
    async with asyncio.TaskGroup() as asking:
        tasks = [asking.create_task(_asked(check, on_done), name=f"doctor: {check.name}") for check in checks]
    return [finding for task in tasks for finding in task.result()]


async def _asked(check: Check, on_done: Callable[[str], None]) -> list[Finding]:
    findings = await _answer(check)
    on_done(check.name)
    return findings


async def _answer(check: Check) -> list[Finding]:
    """What the check found; a FAIL where it crashed or took too long."""
    try:
        async with asyncio.timeout(check.deadline_s) as deadline:
            if inspect.iscoroutinefunction(check.ask):
                answer = await check.ask()
            else:
                answer = await in_thread(check.ask, name=check.name)
    except TimeoutError as error:
        if not deadline.expired():
            return [crashed(check.name, error)]
        reason = f"no answer within {check.deadline_s:g} s"
        return [fail(check.name, reason, "see what hangs: a disk, a driver, a network; then ask again")]
    except Exception as error:
        return [crashed(check.name, error)]
    return [answer] if isinstance(answer, Finding) else list(answer)


def crashed(name: str, error: Exception) -> Finding:
    """What an error says. Our own errors say what to do; any other is a check that broke."""
    if isinstance(error, AgentRLError):
        return fail(name, shortened(str(error)), "do what the reason says, then ask again")
    reason = shortened(f"the check itself failed: {type(error).__name__}: {error}")
    return fail(name, reason, "mend the reason; where it makes no sense, report it with this line")


def shortened(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """One line of it, cut where it is too long."""
    line = " ".join(text.split())
    return line if len(line) <= max_characters else f"{line[: max_characters - 4]} ..."
