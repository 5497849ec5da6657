"""The wait graph: which part waits for which, for how long, and what counts as a movement."""

from __future__ import annotations

import threading

import pytest

from agentrl.supervision.wait_graph import RECENT_S, Gauges, WaitGraph


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def wait_graph(clock: Clock) -> WaitGraph:
    return WaitGraph(clock)


def test_waits_that_are_alike_are_one_line_as_old_as_the_oldest(wait_graph: WaitGraph, clock: Clock) -> None:
    with wait_graph.waiting("episodes", on="engine", what="generate"):
        clock.now_s += 5
        with wait_graph.waiting("episodes", on="engine", what="generate"):
            clock.now_s += 2
            (line,) = wait_graph.snapshot().waits
    assert (line.count, line.seconds) == (2, 7)
    assert str(line) == "the episodes wait for the engine (2 x generate, 7 s)"
    assert wait_graph.snapshot().waits == ()


def test_an_answer_to_one_makes_the_others_young(wait_graph: WaitGraph, clock: Clock) -> None:
    with wait_graph.waiting("episodes", on="engine", what="generate"):
        clock.now_s += 5
        with wait_graph.waiting("episodes", on="engine", what="generate"):
            clock.now_s += 1
        clock.now_s += 2
        assert wait_graph.snapshot().waits[0].seconds == 2


def test_a_call_that_is_tried_again_has_waited_since_the_first_try(wait_graph: WaitGraph, clock: Clock) -> None:
    for _ in range(3):
        with pytest.raises(TimeoutError), wait_graph.waiting("episodes", on="engine", what="generate"):
            clock.now_s += 300
            raise TimeoutError
        clock.now_s += 1
    (line,) = wait_graph.snapshot().waits
    assert (line.count, line.seconds) == (0, 903)
    clock.now_s += RECENT_S
    assert wait_graph.snapshot().waits == ()
    with wait_graph.waiting("episodes", on="engine", what="generate"):
        assert wait_graph.snapshot().waits[0].seconds == 0


def test_an_answer_is_a_movement_and_a_failure_is_none(wait_graph: WaitGraph, clock: Clock) -> None:
    clock.now_s += 10
    with pytest.raises(ValueError), wait_graph.waiting("episodes", on="engine", what="generate"):
        raise ValueError
    assert wait_graph.snapshot().quiet_s == 10
    with wait_graph.waiting("rollouts", on="training loop", what="a slot", moves=False):
        pass
    assert wait_graph.snapshot().quiet_s == 10
    with wait_graph.waiting("episodes", on="engine", what="generate"):
        pass
    assert (wait_graph.snapshot().quiet_s, wait_graph.snapshot().last_beat) == (0, "engine")


def test_the_chain_ends_with_whom_all_wait_for(wait_graph: WaitGraph, clock: Clock) -> None:
    with (
        wait_graph.waiting("learner", on="training loop", what="a batch"),
        wait_graph.waiting("rollouts", on="training loop", what="a slot"),
        wait_graph.waiting("training loop", on="rollouts", what="a full batch"),
    ):
        clock.now_s += 7
        with (
            wait_graph.waiting("rollouts", on="episodes", what="a group"),
            wait_graph.waiting("episodes", on="engine at http://x", what="generate"),
        ):
            clock.now_s += 905
            chain = wait_graph.snapshot().chain()
    assert "; ".join(map(str, chain)) == (
        "the training loop waits for the rollouts (a full batch, 912 s); "
        "the rollouts wait for the episodes (a group, 905 s); "
        "the episodes wait for the engine at http://x (generate, 905 s)"
    )


def test_a_chain_of_two_that_wait_for_each_other_ends(wait_graph: WaitGraph) -> None:
    with (
        wait_graph.waiting("training loop", on="learner", what="a step"),
        wait_graph.waiting("learner", on="training loop", what="b"),
    ):
        assert [line.who for line in wait_graph.snapshot().chain()] == ["training loop"]


def test_a_deadline_is_open_until_it_is_past(wait_graph: WaitGraph, clock: Clock) -> None:
    with wait_graph.waiting("training loop", on="learner", what="a step", within_s=60):
        clock.now_s += 59
        assert wait_graph.snapshot().has_open_deadline
        clock.now_s += 2
        assert not wait_graph.snapshot().has_open_deadline
    assert not wait_graph.snapshot().has_open_deadline


def test_phases_nest(wait_graph: WaitGraph) -> None:
    with wait_graph.phase("training"):
        with wait_graph.phase("evaluating"):
            assert wait_graph.snapshot().phase == "evaluating"
        assert wait_graph.snapshot().phase == "training"
    assert wait_graph.snapshot().phase == "starting"
    with wait_graph.phase("training", then="finishing"):
        pass
    assert wait_graph.snapshot().phase == "finishing"
    with pytest.raises(ValueError), wait_graph.phase("exporting"):
        raise ValueError
    assert wait_graph.snapshot().phase == "exporting"


def test_gauges_are_read_when_the_loop_turns(wait_graph: WaitGraph) -> None:
    steps = [0]
    wait_graph.measure(lambda: Gauges(step=steps[0]))
    steps[0] = 5
    assert wait_graph.snapshot().gauges.step == 0
    wait_graph.loop_turned()
    assert wait_graph.snapshot().gauges.step == 5


def test_a_snapshot_may_be_taken_by_another_thread_at_any_moment() -> None:
    wait_graph, failures, over = WaitGraph(), [], threading.Event()

    def read() -> None:
        while not over.is_set():
            try:
                assert len(wait_graph.snapshot().waits) <= 1
            except Exception as error:
                failures.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(3000):
        with wait_graph.waiting("episodes", on="engine", what="generate"):
            wait_graph.beat(str(number % 3))
    over.set()
    reader.join()
    assert failures == []
