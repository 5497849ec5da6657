"""When everything of a run happened: each episode, the steps of the learner, the weight updates, and who was idle.

Times are those of the processes that measured them: of episodes, where they were played. Independent of pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from agentrl.buffer.journal_format import StepTimes
from agentrl.report.metrics import MetricsLine
from agentrl.view.rows import EpisodeRow
from agentrl.view.run_reader import RunReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One episode's way, in seconds since `Timeline.began_at`.

    Between two generations its tools and its environment work. Example:
        Lane(kind="train", eval_set="", step=3, group_id=7, episode_id="train-7-0", reward=1.0, started=0.0, played=9.5,
             ready=12.0, taken=12.5, stepped=14.0, generating=(0.1, 4.0, 4.5, 9.4))
    """

    kind: str
    eval_set: str
    step: int
    group_id: int
    episode_id: str
    reward: float
    started: float
    generating: tuple[float, ...]  # asked for, answered, asked for, ...; the engine's own queue is part of it
    played: float  # its last turn was over
    ready: float  # the last of its group was
    taken: float | None = None  # into a batch; None for a held-out episode, and where the journal does not say
    stepped: float | None = None  # the learner had made that step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """One step, in seconds since `Timeline.began_at`. Example: `span.taken - span.waited`."""

    step: int
    waited: float  # for its batch, from then on
    taken: float  # the batch was complete
    stepped: float  # the learner had made the step
    held: float  # every engine held its weights
    engine_busy: float | None  # share of the time from `since` to `held`
    since: float  # the weights before were held; of the first step of an attempt, `waited`


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All of it. Example: `timeline_of(reader).learner_idle`."""

    began_at: float  # Unix s
    lanes: tuple[Lane, ...]  # by start
    steps: tuple[StepSpan, ...]
    learner_idle: float | None  # share of the time from its first batch to its last step
    engine_idle: float | None  # share of the time of all steps
    num_without_times: int  # episodes of an older agentrl, or of an endpoint that says none
    num_dropped: int  # groups that were finished or failed and not trained: their episodes are not kept
    sampled: bool


def timeline_of(reader: RunReader) -> Timeline:
    """What the run's files say of times."""
    reader.index.refresh()
    times = reader.step_times()
    rows = list(reader.index.episodes())
    timed = [row for row in rows if _is_timed(row)]
    starts = [row.info["started_at"] for row in timed] + [one.waited_at for one in times.values()]
    began_at = min(starts, default=0.0)
    lines = {line.step: line for line in reader.metrics("step")}
    steps = tuple(_steps(times, lines, began_at))
    by_step = {one.step: one for one in steps}
    lanes = [lane for members in _groups(timed) for lane in _lanes(members, by_step, began_at)]
    dropped = ("dropped_stale", "dropped_zero_variance", "failed", "cancelled", "restarted")
    return Timeline(
        began_at=began_at,
        lanes=tuple(sorted(lanes, key=lambda lane: lane.started)),
        steps=steps,
        learner_idle=_learner_idle(steps),
        engine_idle=_engine_idle(lines.values()),
        num_without_times=len(rows) - len(timed),
        num_dropped=sum(row["state"] in dropped for row in reader.ledger()),
        sampled=reader.index.is_sample,
    )


def _is_timed(row: EpisodeRow) -> bool:
    return {"started_at", "ended_at"} <= row.info.keys()


def _groups(rows: Iterable[EpisodeRow]) -> Iterable[Sequence[EpisodeRow]]:
    for _, members in groupby(rows, key=lambda row: (row.kind, row.eval_set, row.step, row.group_id)):
        yield list(members)


def _lanes(members: Sequence[EpisodeRow], steps: Mapping[int, StepSpan], began_at: float) -> Iterable[Lane]:
    ready = max(row.info["ended_at"] for row in members)
    for row in members:
        step = steps.get(row.step) if row.kind == "train" else None
        yield Lane(
            kind=row.kind,
            eval_set=row.eval_set,
            step=row.step,
            group_id=row.group_id,
            episode_id=row.episode_id,
            reward=row.reward,
            started=_since(row.info["started_at"], began_at),
            generating=tuple(_since(at, began_at) for span in _joined(row.generated_at) for at in span),
            played=_since(row.info["ended_at"], began_at),
            ready=_since(ready, began_at),
            taken=step.taken if step else None,
            stepped=step.stepped if step else None,
        )


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """In order, and those that overlap as one: an agent may wait for several calls at once.

    >>> _joined([(5.0, 6.0), (1.0, 3.0), (2.0, 4.0)])
    [(1.0, 4.0), (5.0, 6.0)]
    """
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _steps(times: Mapping[int, StepTimes], lines: Mapping[int, MetricsLine], began_at: float) -> Iterator[StepSpan]:
    held = 0.0
    for step in sorted(times):
        at = times[step]
        yield StepSpan(
            step=step,
            waited=_since(at.waited_at, began_at),
            taken=_since(at.taken_at, began_at),
            stepped=_since(at.stepped_at, began_at),
            held=_since(at.held_at, began_at),
            engine_busy=lines[step].values.get("engine/busy_share") if step in lines else None,
            since=_since(max(held, at.waited_at), began_at),
        )
        held = at.held_at


def _since(at: float, began_at: float) -> float:
    return round(at - began_at, 3)


def _learner_idle(steps: Sequence[StepSpan]) -> float | None:
    """A run that was continued was not idle in between: a step is waited for again."""
    if not steps:
        return None
    waiting = sum(one.taken - one.waited for one in steps[1:])
    working = sum(one.stepped - one.taken for one in steps)
    return waiting / (waiting + working) if waiting + working > 0 else None


def _engine_idle(lines: Iterable[MetricsLine]) -> float | None:
    measured = [line.values for line in lines if {"engine/busy_share", "run/step_s"} <= line.values.keys()]
    total_s = sum(values["run/step_s"] for values in measured)
    return (
        sum((1 - values["engine/busy_share"]) * values["run/step_s"] for values in measured) / total_s
        if total_s
        else None
    )
