"""What passes between the orchestrator and a rollout worker, as msgpack, and the paths of the routes.

A worker joins and gets a lease. Then it asks for `Orders` again and again, with a `Report` of the groups that it holds;
the orders are the difference between those and the groups that it should hold. So a lost answer is mended by the next
one. A finished group is sent as a `Result`. Independent of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from agentrl import errors
from agentrl.engine.base import EngineState
from agentrl.errors import AgentRLError
from agentrl.run_folder import EpisodeKind
from agentrl.types import Task, TrajectoryGroup

T = TypeVar("T")
GroupKey = tuple[EpisodeKind, str, int, bool]
"""Kind, name of the held-out set, group id, whether it is played on spare engines."""

MEDIA_TYPE = "application/msgpack"
RUN, JOIN, ORDERS = "/v1/workers/run", "/v1/workers/join", "/v1/workers/orders"
RESULT, ENGINE_FAILURE, LEAVE = "/v1/workers/result", "/v1/workers/engine-failure", "/v1/workers/leave"
ALIVE = "/v1/workers/alive"
PARK_S = 2.0
"""Longest time that a call for orders waits for some."""
MAX_TEXT = 2000
"""Characters of an error's message that are sent."""


def encode(record: Any) -> bytes:
    """A record as msgpack."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, record_type: type[T]) -> T:
    """msgpack into `record_type`. Raises msgspec.ValidationError when a field is missing or of another type."""
    return msgspec.msgpack.decode(data, type=record_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a worker must know of a run before it can play. Example: the answer of `GET /v1/workers/run`."""

    config: dict[str, Any]  # the resolved config
    model_path: str  # where the tokenizer is
    sandbox_url: str  # when it is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """A worker that is ready to play. Example: `Joining(name="rollout-worker-0")`."""

    name: str  # unique: a second worker of the same name replaces the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The orchestrator's answer. Example: `Joined(lease="5f3c")`."""

    lease: str  # names the worker in every call from now on


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One attempt at one group. Example: `Play(kind="train", group_id=7, number=12)`."""

    kind: EpisodeKind
    group_id: int  # unique within its kind and set
    number: int  # of the attempt: no other in the run has it, also none at the same group
    set_name: str = ""  # of `eval.sets`, whose environment is played
    is_spare: bool = False  # on the engines of `eval.engines`

    @property
    def key(self) -> GroupKey:
        """The same for every attempt at the group."""
        return self.kind, self.set_name, self.group_id, self.is_spare


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A group to play. Example: `Assignment(play=play, task=task)`."""

    play: Play
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a worker holds, and how it does. Counts are since it joined. Example: `Report(lease="5f3c")`."""

    lease: str
    revision: int = -1  # of the last orders that it applied
    held: tuple[Play, ...] = ()  # groups that it plays, or whose result is on its way
    num_tokens: int = 0
    num_beats: int = 0  # movements: tokens that arrived, answers of environments
    is_generating: bool = False
    late_s: float = 0.0  # how late its event loop was at most since the last report


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a worker is to do. The states of the engines hold before the assignments are begun.

    Example: `Orders(revision=4, engines=engine.states(), assignments=(assignment,))`.
    """

    revision: int
    engines: tuple[EngineState, ...]
    assignments: tuple[Assignment, ...] = ()
    cancelled: tuple[Play, ...] = ()
    sandbox_url: str | None = None  # where it is now; None: where it was


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayError:
    """Why a group could not be played. Example: `PlayError.of(EngineError("gone"))`."""

    kind: str  # a class of agentrl.errors; anything else is a mistake in the program
    message: str

    @classmethod
    def of(cls, error: Exception) -> PlayError:
        """The nearest class of agentrl.errors, and the message."""
        known = next((base for base in type(error).__mro__ if getattr(errors, base.__name__, None) is base), None)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        return cls(kind=known.__name__ if known else "", message=text[:MAX_TEXT])

    def as_exception(self, worker: str) -> AgentRLError:
        """The same error, to be raised here; the message names the worker."""
        found = getattr(errors, self.kind, None)
        error = found if isinstance(found, type) and issubclass(found, AgentRLError) else AgentRLError
        return error(f"{self.message} ({worker})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The end of a play: a group or an error. Example: `Result(lease="5f3c", play=play, group=group)`."""

    lease: str
    play: Play
    group: TrajectoryGroup | None = None
    error: PlayError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailure:
    """A request to an engine failed: the orchestrator must look at it.

    Example: `EngineFailure(lease="5f3c", index=0)`.
    """

    lease: str
    index: int
    num_checks: int = 0  # of the engine's state when the request failed
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """A worker plays, though it asks for no orders. Example: `Alive(lease="5f3c")`."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A worker ends. Example: `Leaving(lease="5f3c", reason="the event loop stood still for 30 s")`."""

    lease: str
    reason: str = field(default="it was stopped")
