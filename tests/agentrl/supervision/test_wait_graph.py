"""The board: who waits for whom, for how long, and what counts as a movement."""

from __future__ import annotations

import threading

import pytest

from agentrl.supervision.wait_graph import RECENT_S, Gauges, Progress


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> Progress:
    return Progress(clock)


def test_waits_that_are_alike_are_one_line_as_old_as_the_oldest(progress: Progress, clock: Clock) -> None:
    with progress.waiting("episodes", on="engine", what="generate"):
        clock.now_s += 5
        with progress.waiting("episodes", on="engine", what="generate"):
            clock.now_s += 2
            (line,) = progress.snapshot().waits
    assert (line.count, line.seconds) == (2, 7)
    assert str(line) == "the episodes wait for the engine (2 x generate, 7 s)"
    assert progress.snapshot().waits == ()


def test_an_answer_to_one_makes_the_others_young(progress: Progress, clock: Clock) -> None:
    with progress.waiting("episodes", on="engine", what="generate"):
        clock.now_s += 5
        with progress.waiting("episodes", on="engine", what="generate"):
            clock.now_s += 1
        clock.now_s += 2
        assert progress.snapshot().waits[0].seconds == 2


def test_a_call_that_is_tried_again_has_waited_since_the_first_try(progress: Progress, clock: Clock) -> None:
    for _ in range(3):
        with pytest.raises(TimeoutError), progress.waiting("episodes", on="engine", what="generate"):
            clock.now_s += 300
            raise TimeoutError
        clock.now_s += 1
    (line,) = progress.snapshot().waits
    assert (line.count, line.seconds) == (0, 903)
    clock.now_s += RECENT_S
    assert progress.snapshot().waits == ()
    with progress.waiting("episodes", on="engine", what="generate"):
        assert progress.snapshot().waits[0].seconds == 0


def test_an_answer_is_a_movement_and_a_failure_is_none(progress: Progress, clock: Clock) -> None:
    clock.now_s += 10
    with pytest.raises(ValueError), progress.waiting("episodes", on="engine", what="generate"):
        raise ValueError
    assert progress.snapshot().quiet_s == 10
    with progress.waiting("rollouts", on="conductor", what="a slot", moves=False):
        pass
    assert progress.snapshot().quiet_s == 10
    with progress.waiting("episodes", on="engine", what="generate"):
        pass
    assert (progress.snapshot().quiet_s, progress.snapshot().last_beat) == (0, "engine")


def test_the_chain_ends_with_whom_all_wait_for(progress: Progress, clock: Clock) -> None:
    with (
        progress.waiting("learner", on="conductor", what="a batch"),
        progress.waiting("rollouts", on="conductor", what="a slot"),
        progress.waiting("conductor", on="rollouts", what="a full batch"),
    ):
        clock.now_s += 7
        with (
            progress.waiting("rollouts", on="episodes", what="a group"),
            progress.waiting("episodes", on="engine at http://x", what="generate"),
        ):
            clock.now_s += 905
            chain = progress.snapshot().chain()
    assert "; ".join(map(str, chain)) == (
        "the conductor waits for the rollouts (a full batch, 912 s); "
        "the rollouts wait for the episodes (a group, 905 s); "
        "the episodes wait for the engine at http://x (generate, 905 s)"
    )


def test_a_chain_of_two_that_wait_for_each_other_ends(progress: Progress) -> None:
    with (
        progress.waiting("conductor", on="learner", what="a step"),
        progress.waiting("learner", on="conductor", what="b"),
    ):
        assert [line.who for line in progress.snapshot().chain()] == ["conductor"]


def test_a_deadline_is_open_until_it_is_past(progress: Progress, clock: Clock) -> None:
    with progress.waiting("conductor", on="learner", what="a step", within_s=60):
        clock.now_s += 59
        assert progress.snapshot().has_open_deadline
        clock.now_s += 2
        assert not progress.snapshot().has_open_deadline
    assert not progress.snapshot().has_open_deadline


def test_phases_nest(progress: Progress) -> None:
    with progress.phase("training"):
        with progress.phase("evaluating"):
            assert progress.snapshot().phase == "evaluating"
        assert progress.snapshot().phase == "training"
    with pytest.raises(ValueError), progress.phase("exporting"):
        raise ValueError
    assert progress.snapshot().phase == "exporting"


def test_gauges_are_read_when_the_loop_turns(progress: Progress) -> None:
    steps = [0]
    progress.measure(lambda: Gauges(step=steps[0]))
    steps[0] = 5
    assert progress.snapshot().gauges.step == 0
    progress.turned()
    assert progress.snapshot().gauges.step == 5


def test_a_snapshot_may_be_taken_by_another_thread_at_any_moment() -> None:
    progress, failures, over = Progress(), [], threading.Event()

    def read() -> None:
        while not over.is_set():
            try:
                assert len(progress.snapshot().waits) <= 1
            except Exception as error:
                failures.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(3000):
        with progress.waiting("episodes", on="engine", what="generate"):
            progress.beat(str(number % 3))
    over.set()
    reader.join()
    assert failures == []
