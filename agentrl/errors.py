"""The exception tree, and `boundary`, which attributes a failure once, to the part that failed.

AgentRLError
 +- ConfigError            a setting or an input file is wrong; the message says where and how to fix it
 |   +- DataError          a row of a data set is wrong; the message has file and line
 |   +- MissingDependencyError   an optional package is not installed
 +- InfraError             a part failed: the episode is retried or dropped and counted, never scored
 |   +- EnvError           the environment's own code raised
 |   |   +- ToolBroken         one of its tools did (ToolError instead is the model's mistake)
 |   +- SandboxError       the sandbox service failed (model code that fails is an observation instead)
 |   +- EngineError        the engine failed
 |   |   +- EngineGone        its process is gone, or the connection to it broke
 |   |   +- WeightSyncError   an engine does not hold the weights it should; always ends the run
 |   |       +- PreviousWeightsKept   an update failed, and the engine is proven to hold the previous weights
 |   +- LearnerError       the learner process failed
 |   +- JournalError       the run's journal could not be written or read
 |   +- DiskError          another file of the run could not be written
 |   +- CanaryFailed       a part works but gives wrong outcomes; ends the run at once
 |   +- RunStalled         nothing moved for too long; names the waits, ends the run
 +- StaleTrajectoryError   the lag bound was broken at consumption: a bug, ends the run
 +- LearnerReplaced        another learner process took over; the run continues from the journal
 +- RunOver                there is no further batch: the learner exports its weights and ends
 +- WeightsWanted          an engine was restarted; the learner publishes again, and nothing is lost
 +- ErrorRateExceeded      too many groups failed for infrastructure reasons; ends the run
 +- NoLearningSignal       group after group had equal rewards; ends the run

Example:
    with boundary(EngineError, "engine at http://a:8000"):
        reply = await post(body)  # a ValueError here becomes an EngineError that names the engine
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

DISTRIBUTION = "agentrl-vcpo"
"""The project's name for pip; `agentrl` on PyPI is another package."""


class AgentRLError(Exception):
    """Root of everything agentrl raises on purpose."""


class ConfigError(AgentRLError, ValueError):
    """A setting or an input file is wrong. The message says what is wrong, where, and how to fix it."""


class DataError(ConfigError):
    """A row of a data set is wrong; the message starts with file:line."""


class MissingDependencyError(ConfigError):
    """An optional package is needed; the message has the command that installs it."""

    @classmethod
    def of_extra(cls, need: str, extra: str) -> MissingDependencyError:
        """`need` says what is missing, and what for; `extra` is the name in pyproject.toml.

        Example:
            raise MissingDependencyError.of_extra("the mcp package is not installed", "mcp")
        """
        checkout = Path(__file__).parent.parent
        here = checkout if (checkout / "pyproject.toml").is_file() else None
        command = f"pip install -e '{here}[{extra}]'" if here else f"pip install '{DISTRIBUTION}[{extra}]'"
        return cls(f"{need}: {command}")


class InfraError(AgentRLError):
    """A part of the system failed. Never a reward."""


class EnvError(InfraError):
    """Environment code raised."""


class ToolBroken(EnvError):
    """A tool of the environment raised, or took too long."""


class SandboxError(InfraError):
    """The sandbox service failed or is gone."""


class EngineError(InfraError):
    """The engine failed, gave an inconsistent answer, or is gone."""


class EngineGone(EngineError):
    """The engine cannot be reached. It may return."""


class WeightSyncError(EngineError):
    """An engine does not hold the weights it should hold."""


class PreviousWeightsKept(WeightSyncError):
    """An update failed. The engine is proven to hold the previous weights and serves them."""


class WeightsWanted(AgentRLError):
    """An engine was restarted, or an update broke off: only the learner can give it the current weights, and must
    publish them again."""


class WorkerLost(InfraError):
    """A rollout worker died, hung or could not be reached while it played a group."""


class WorkerExpired(AgentRLError):
    """The orchestrator has given this rollout worker up and plays its groups elsewhere. It must join again."""


class LearnerError(InfraError):
    """The learner process failed."""


class JournalError(InfraError):
    """The run's journal could not be written or read. Without it a crash would lose work."""


class DiskError(InfraError):
    """A file of the run could not be written: further results would be lost."""


class LearnerReplaced(AgentRLError):
    """A new learner process replaced this one. The run continues from the journal."""


class RunOver(AgentRLError):
    """There is no further batch: the learner exports its weights and ends."""


class CanaryFailed(InfraError):
    """A program or an answer with a known outcome gave another one."""


class RunStalled(InfraError):
    """Nothing moved for too long, or the event loop stood still. The message names the waits, and the file with all
    stacks."""


class StaleTrajectoryError(AgentRLError):
    """A trajectory older than max_lag reached the learner."""


class ErrorRateExceeded(AgentRLError):
    """Too many groups failed for infrastructure reasons. The first failure is the cause."""


class NoLearningSignal(AgentRLError):
    """Group after group had equal rewards, which carry no policy gradient."""


@contextmanager
def boundary(error_type: type[InfraError], what: str) -> Iterator[None]:
    """Turn any exception inside into `error_type`, with its cause; errors that are already attributed pass through.

    Cancellation passes through as well.

    Example:
        with boundary(SandboxError, "python tool"):
            await session.exec(code)
    """
    try:
        yield
    except (AgentRLError, asyncio.CancelledError):
        raise
    except Exception as error:
        raise error_type(f"{what}: {type(error).__name__}: {error}") from error


def raise_first(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise the first error of a TaskGroup by itself, with its own cause, which a plain `raise` would replace."""
    first = group.exceptions[0]
    raise first from first.__cause__
