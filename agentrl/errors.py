"""The exception tree, and `boundary`, which attributes a failure once, to the part that failed.

AgentRLError
 +- ConfigError            the user's settings or files are wrong; the message says where and what to do
 |   +- DataError          a row of a data set is wrong: file and line
 |   +- MissingDependencyError
 +- InfraError             a part failed: the episode is retried or dropped and counted, never scored
 |   +- EnvError           the environment's own code raised
 |   +- SandboxError       the sandbox service failed (model code that fails is an observation, not this)
 |   +- EngineError        the engine failed
 |   |   +- EngineGone        its process is gone, or the connection to it broke
 |   |   +- WeightSyncError   an engine does not hold the weights it should: always ends the run
 |   +- LearnerError       the learner process failed
 |   +- JournalError       the run's journal could not be written or read
 |   +- DiskError          another file of the run could not be written
 |   +- CanaryFailed       a part works and gives wrong outcomes: ends the run at once
 |   +- RunStalled         nothing moved for too long: says who waits for whom, ends the run
 +- StaleTrajectoryError   the lag bound was broken at consumption: a bug, ends the run
 +- LearnerReplaced        another learner took over: the run goes on from the journal
 +- WeightsWanted          an engine was restarted: the learner publishes again, and nothing is lost
 +- ErrorRateExceeded      too many episodes failed for infrastructure reasons
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class AgentRLError(Exception):
    """Root of everything agentrl raises on purpose."""


class ConfigError(AgentRLError, ValueError):
    """A setting or an input file is wrong. The message says what, where, and the mend."""


class DataError(ConfigError):
    """A row of a data set is wrong; the message starts with file:line."""


class MissingDependencyError(ConfigError):
    """An optional package is needed; the message names the extra to install."""


class InfraError(AgentRLError):
    """A part of the system failed. Never a reward."""


class EnvError(InfraError):
    """Environment code raised."""


class SandboxError(InfraError):
    """The sandbox service failed or is gone."""


class EngineError(InfraError):
    """The engine failed, answered nonsense, or is gone."""


class EngineGone(EngineError):
    """Nobody answers for the engine any more: it may come back."""


class WeightSyncError(EngineError):
    """An engine does not hold the weights it should hold."""


class WeightsWanted(AgentRLError):
    """An engine was restarted, and only the learner can give it the present weights: they must be published again."""


class LearnerError(InfraError):
    """The learner process failed."""


class JournalError(InfraError):
    """The run's journal could not be written or read: without it no work is safe."""


class DiskError(InfraError):
    """A file of the run could not be written: what it makes from here on would be lost."""


class LearnerReplaced(AgentRLError):
    """A learner was restarted, and another process stands where it stood: the run goes on from the journal."""


class CanaryFailed(InfraError):
    """A program or an answer whose outcome is known came out otherwise."""


class RunStalled(InfraError):
    """Nothing moved for too long, or the event loop stood still. The message names who waits for whom, and the dump."""


class StaleTrajectoryError(AgentRLError):
    """A trajectory older than max_lag reached the learner."""


class ErrorRateExceeded(AgentRLError):
    """Too many episodes failed for infrastructure; the first cause is chained."""


class NoLearningSignal(AgentRLError):
    """Group after group had equal rewards; a policy gradient has nothing to use."""


@contextmanager
def boundary(error_type: type[InfraError], what: str) -> Iterator[None]:
    """Turn any failure inside into `error_type` once, cause kept; errors already attributed pass through.

    Cancellation is never touched. Example: `with boundary(SandboxError, "python tool"): await session.exec(code)`
    """
    try:
        yield
    except (AgentRLError, asyncio.CancelledError):
        raise
    except Exception as error:
        raise error_type(f"{what}: {type(error).__name__}: {error}") from error


def raise_first(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise the first error of a TaskGroup as itself: its own cause stays, which `raise ... from` would replace."""
    first = group.exceptions[0]
    raise first from first.__cause__
