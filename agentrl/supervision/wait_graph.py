"""The wait graph of a run: which part waits for which, when something last moved, and how far the run is.

The event loop of the run writes it; any thread may read a snapshot. It only records: the watchdog (watchdog.py) and the
status file (status.py) judge. Independent of engines, buffers and files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

RECENT_S = 60.0
"""A wait that ended without an answer continues in the next wait of its kind within this time: a call that is retried
has waited since its first try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """How far a run is. The names in the mappings are for people. Example: `Gauges(step=3, num_steps=100)`."""

    step: int = 0
    num_steps: int = 0
    version: int = 0  # in the engines
    learner_version: int = 0
    lag: int = 0  # largest in the last batch, in steps
    max_lag: int | None = 0  # None: without a bound
    num_tokens: int = 0  # generated since the start
    ledger: Mapping[str, int] = field(default_factory=dict)  # groups
    queues: Mapping[str, int] = field(default_factory=dict)  # entries
    useful_groups: float | None = None  # share of the groups that finished last; None before the first
    learning: tuple[str, ...] = ()  # how many groups are useful, and where they are few, why and what to do


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitLine:
    """All waits of one kind: the part `who` waits for the part `on` to deliver `what`.

    >>> print(WaitLine(who="learner", on="training loop", what="a batch", count=1, seconds=3.0))
    the learner waits for the training loop (a batch, 3 s)
    """

    who: str
    on: str
    what: str
    count: int  # waits at this moment; 0: the last one ended without an answer moments ago and may be retried
    seconds: float  # since the oldest began, or since one of them got its answer
    deadline_in_s: float | None = None  # until the last of their own deadlines; negative when it is past

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        verb = "wait" if self.who.endswith("s") else "waits"
        return f"the {self.who} {verb} for the {self.on} ({times}{self.what}, {self.seconds:.0f} s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The wait graph at one moment. Example: `"; ".join(map(str, snapshot.chain()))` says why a run waits."""

    phase: str
    phase_s: float
    num_beats: int
    last_beat: str
    quiet_s: float  # since anything moved
    loop_quiet_s: float  # since the event loop last ran; 0 where nothing checks it
    waits: tuple[WaitLine, ...]  # oldest first
    gauges: Gauges

    @property
    def has_open_deadline(self) -> bool:
        """Whether a wait has a deadline of its own that is still ahead: the part that waits ends it then."""
        return any(wait.count and (wait.deadline_in_s or 0.0) > 0 for wait in self.waits)

    def chain(self) -> tuple[WaitLine, ...]:
        """From the training loop (else from the oldest wait) to the part that all of them wait for in the end."""
        chain: list[WaitLine] = []
        who = next((wait.who for wait in self.waits if wait.who == "training loop"), None)
        who = who or next((wait.who for wait in self.waits), None)
        passed = set()
        while who is not None:
            passed.add(who)
            # Oldest first, and a call under way before one that ended without an answer.
            ahead = [wait for wait in self.waits if wait.who == who and wait.on not in passed]
            ahead.sort(key=lambda wait: wait.count == 0)
            chain.extend(ahead[:1])
            who = ahead[0].on if ahead else None
        return tuple(chain)


@dataclass(slots=True, kw_only=True)
class _Edge:
    """All waits of one kind."""

    since: float | None = None  # clock; None: no answer is outstanding
    left: float = 0.0  # clock, when the last one ended
    deadlines: dict[int, float | None] = field(default_factory=dict)  # of the current waits, by number


class WaitGraph:
    """One per run. Every method returns at once and may be called from any thread.

    >>> graph = WaitGraph()
    >>> with graph.waiting("training loop", on="learner", what="a step"):
    ...     [wait.on for wait in graph.snapshot().chain()]
    ['learner']
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # re-entrant: a signal handler in the same thread must not deadlock
        self._edges: dict[tuple[str, str, str], _Edge] = {}
        self._num_waits = 0
        self._num_beats = 0
        self._last_beat = "start"
        self._beat_at = self._phase_at = clock()
        self._turned_at: float | None = None
        self._phase = "starting"
        self._gauges = Gauges()
        self._read: Callable[[], Gauges] | None = None

    @contextmanager
    def waiting(
        self, who: str, *, on: str, what: str, within_s: float | None = None, moves: bool = True
    ) -> Iterator[None]:
        """While the block runs, the part `who` waits for the part `on` to deliver `what`.

        Args:
            what: a kind of thing, not a single one: equal waits are counted together.
            within_s: the wait's own deadline, for waits whose end ends the run.
            moves: leaving the block without an error counts as a beat of `on`. False where a failure delivers the same
                thing, such as a free slot.
        """
        with self._lock:
            self._num_waits += 1
            number, key, now = self._num_waits, (who, on, what), self._clock()
            edge = self._edges.setdefault(key, _Edge())
            if edge.since is None or (not edge.deadlines and now - edge.left > RECENT_S):
                edge.since = now
            edge.deadlines[number] = None if within_s is None else now + within_s
        answered = False
        try:
            yield
            answered = True
        finally:
            with self._lock:
                del edge.deadlines[number]
                edge.left = self._clock()
                if answered:
                    edge.since = edge.left if edge.deadlines else None
                    if moves:
                        self.beat(on)

    def beat(self, who: str) -> None:
        """The part `who` moved something. A failure is not a movement."""
        with self._lock:
            self._num_beats += 1
            self._last_beat, self._beat_at = who, self._clock()

    @contextmanager
    def phase(self, name: str, *, then: str | None = None) -> Iterator[None]:
        """The run is in this phase while the block runs, and in `then` after it (None: in the previous one again).
        After an error it stays here."""
        after = then or self._phase
        self._enter(name)
        yield
        self._enter(after)

    def measure(self, read: Callable[[], Gauges]) -> None:
        """From now on `loop_turned` takes the gauges from `read`, in the event loop."""
        self._read = read
        self._gauges = read()

    def loop_turned(self) -> None:
        """The event loop runs: its watchdog calls this in the loop."""
        if self._read is not None:
            self._gauges = self._read()
        self._turned_at = self._clock()

    def snapshot(self) -> Snapshot:
        """The wait graph now."""
        with self._lock:
            now = self._clock()
            waits = [_line(key, edge, now) for key, edge in self._edges.items() if _is_outstanding(edge, now)]
            return Snapshot(
                phase=self._phase,
                phase_s=now - self._phase_at,
                num_beats=self._num_beats,
                last_beat=self._last_beat,
                quiet_s=now - self._beat_at,
                loop_quiet_s=0.0 if self._turned_at is None else now - self._turned_at,
                waits=tuple(sorted(waits, key=lambda wait: -wait.seconds)),
                gauges=self._gauges,
            )

    def _enter(self, phase: str) -> None:
        with self._lock:
            self._phase, self._phase_at = phase, self._clock()
            self.beat("run")


def _is_outstanding(edge: _Edge, now: float) -> bool:
    return edge.since is not None and (bool(edge.deadlines) or now - edge.left <= RECENT_S)


def _line(key: tuple[str, str, str], edge: _Edge, now: float) -> WaitLine:
    who, on, what = key
    assert edge.since is not None
    ends = [deadline for deadline in edge.deadlines.values() if deadline is not None]
    return WaitLine(
        who=who,
        on=on,
        what=what,
        count=len(edge.deadlines),
        seconds=now - edge.since,
        deadline_in_s=max(ends) - now if ends else None,
    )
