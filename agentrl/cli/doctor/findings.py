"""Runs the checks of `agentrl doctor` and turns each into findings, even where a check crashes or hangs.

Independent of any single check: machine.py and packages.py examine the machine, config_checks.py a config, deep.py the
engine together with the learner.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from agentrl.errors import AgentRLError
from agentrl.supervision.threads import in_thread

DEADLINE_S = 60.0  # takes a second on an idle machine; a busy machine is no failure
MAX_CHARACTERS = 500  # of a reason: the error of a library may fill a page


class FindingStatus(StrEnum):
    """What a finding means for a run. Example: `FindingStatus("WARN").name`."""

    OK = "OK"
    WARN = "WARN"
    """The run works, but may surprise."""
    FAIL = "FAIL"
    """The run does not work, or not as configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. Raises ValueError for a WARN or FAIL without a fix.

    Example:
        Finding(name="memory", status=FindingStatus.FAIL, found="1.0 GiB available", fix="end other programs")
    """

    name: str
    status: FindingStatus
    found: str
    fix: str = ""
    """How to fix it; empty for OK."""

    def __post_init__(self) -> None:
        if bool(self.fix) == (self.status is FindingStatus.OK):
            raise ValueError(f"{self.name}: {self.status} and fix={self.fix!r} do not go together")


def ok(name: str, found: str) -> Finding:
    """A finding without a problem."""
    return Finding(name=name, status=FindingStatus.OK, found=found)


def warn(name: str, found: str, fix: str) -> Finding:
    """A finding that does not prevent the run."""
    return Finding(name=name, status=FindingStatus.WARN, found=found, fix=fix)


def fail(name: str, found: str, fix: str) -> Finding:
    """A finding that prevents the run."""
    return Finding(name=name, status=FindingStatus.FAIL, found=found, fix=fix)


Findings = Finding | Sequence[Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check and its deadline. `ask` runs in a thread unless it is a coroutine function.

    Example:
        Check(name="loopback", ask=machine.loopback)
    """

    name: str
    ask: Callable[[], Findings] | Callable[[], Awaitable[Findings]]
    deadline_s: float = DEADLINE_S


async def examine(checks: Sequence[Check], *, on_done: Callable[[str], None] = lambda name: None) -> list[Finding]:
    """Run all checks at once. Findings are in the order of the checks; an error in a check becomes a finding."""
    async with asyncio.TaskGroup() as asking:
        tasks = [asking.create_task(_asked(check, on_done), name=f"doctor: {check.name}") for check in checks]
    return [finding for task in tasks for finding in task.result()]


async def _asked(check: Check, on_done: Callable[[str], None]) -> list[Finding]:
    findings = await _answer(check)
    on_done(check.name)
    return findings


async def _answer(check: Check) -> list[Finding]:
    """The findings of a check; a FAIL where it crashed or exceeded its deadline."""
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
        return [fail(check.name, reason, "find what hangs: a disk, a driver, a network; then run doctor again")]
    except Exception as error:
        return [crashed(check.name, error)]
    return [answer] if isinstance(answer, Finding) else list(answer)


def crashed(name: str, error: Exception) -> Finding:
    """An error as a FAIL. Errors of agentrl say how to fix them; any other is a defect of the check."""
    if isinstance(error, AgentRLError):
        return fail(name, shortened(str(error)), "do what the reason says, then run doctor again")
    reason = shortened(f"the check itself failed: {type(error).__name__}: {error}")
    return fail(name, reason, "fix the reason; if it makes no sense, report it with this line")


def shortened(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """The text on one line, cut to `max_characters`."""
    line = " ".join(text.split())
    return line if len(line) <= max_characters else f"{line[: max_characters - 4]} ..."
