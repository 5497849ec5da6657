"""A timeline as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are microseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from agentrl.view.timeline import Lane, StepSpan, Timeline

LEARNER, EPISODES = 1, 2  # processes of the trace
_ROWS = {0: "learner", 1: "weight updates", 2: "engine"}


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """The trace as JSON can hold it. Episodes share rows where they do not overlap."""
    return {
        "traceEvents": [*_names(timeline), *_steps(timeline.steps), *_episodes(timeline.lanes)],
        "displayTimeUnit": "ms",
        "otherData": {"began_at": timeline.began_at},
    }


def states(lane: Lane) -> Iterator[tuple[str, float, float]]:
    """What an episode did: state, from, to, in order and without gaps.

    >>> lane = Lane(kind="train", eval_set="", step=1, group_id=0, episode_id="a", reward=1.0, started=0.0, played=5.0,
    ...     ready=6.0, taken=7.0, stepped=9.0, generating=(1.0, 2.0, 3.0, 4.0))
    >>> [state for state, _, _ in states(lane)]
    ['start', 'generate', 'tool', 'generate', 'end', 'wait for group', 'in buffer', 'train']
    """
    at = lane.started
    pairs = list(zip(lane.generating[::2], lane.generating[1::2], strict=True))
    for turn, (asked, answered) in enumerate(pairs):
        yield ("tool" if turn else "start", at, asked)
        yield ("generate", asked, answered)
        at = answered
    yield ("end" if pairs else "play", at, lane.played)
    yield ("wait for group", lane.played, lane.ready)
    if lane.taken is not None and lane.stepped is not None:
        yield ("in buffer", lane.ready, lane.taken)
        yield ("train", lane.taken, lane.stepped)


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for process, name in ((LEARNER, "learner and engines"), (EPISODES, "episodes")):
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    for row, name in _ROWS.items():
        yield {"ph": "M", "pid": LEARNER, "tid": row, "name": "thread_name", "args": {"name": name}}


def _steps(steps: Sequence[StepSpan]) -> Iterator[dict[str, Any]]:
    for one in steps:
        yield _span(LEARNER, 0, "wait for batch", one.waited, one.taken, step=one.step)
        yield _span(LEARNER, 0, f"step {one.step}", one.taken, one.stepped, step=one.step)
        yield _span(LEARNER, 1, f"weights of version {one.step}", one.stepped, one.held, step=one.step)
        instant = {"ph": "i", "s": "g", "pid": LEARNER, "tid": 1, "ts": _us(one.held)}
        yield {**instant, "name": f"version {one.step}"}
        if one.engine_busy is not None:
            share = round(100 * one.engine_busy)
            yield _span(LEARNER, 2, f"busy {share} %", one.since, one.held, busy_share=one.engine_busy)


def _episodes(lanes: Sequence[Lane]) -> Iterator[dict[str, Any]]:
    """`lanes` by their start."""
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    rows = 0
    for lane in lanes:
        while taken and taken[0][0] <= lane.started:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, rows = rows, rows + 1
        heapq.heappush(taken, (max(lane.ready, lane.stepped or 0.0), row))
        about = {"kind": lane.kind, "step": lane.step, "group_id": lane.group_id, "reward": lane.reward}
        for state, start, end in states(lane):
            if end > start:
                yield _span(EPISODES, row, state, start, end, episode_id=lane.episode_id, **about)


def _span(process: int, row: int, name: str, start: float, end: float, **about: Any) -> dict[str, Any]:
    where = {"ph": "X", "pid": process, "tid": row, "name": name}
    return {**where, "ts": _us(start), "dur": max(0, _us(end) - _us(start)), "args": about}


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
