"""The causes of groups without a signal, from groups made by hand."""

import pytest

from agentrl.report.learning_signal import REMEDIES, Cause, LearningSignal, signal_in, signal_of, total
from agentrl.testing import completion, group, trajectory
from agentrl.types import Task, TrajectoryGroup, Turn


def made(*rewards: float, texts: int | None = None, logprob: float = -1.0, number: int = 0) -> TrajectoryGroup:
    """A group of single turns with these rewards and `texts` different answers (default: all differ)."""
    members = []
    for i, reward in enumerate(rewards):
        said = completion((i if texts is None else i % texts, 7), (logprob, logprob), 0)
        members.append(trajectory(str(i), [Turn(observation_ids=(1,), completion=said)], reward=reward))
    return group(number, members, task=Task(id=f"t{number}", prompt="?"))


def of(*groups: TrajectoryGroup) -> LearningSignal:
    return total(map(signal_of, groups))


RIGHT, WRONG, HALF = (1.0,) * 4, (0.0,) * 4, (1.0, 0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("groups", "cause"),
    [
        ([made(*RIGHT)] * 20, Cause.ALWAYS_SOLVED),
        ([made(*RIGHT, texts=1)] * 20, Cause.ALWAYS_SOLVED),  # one good answer is no loss
        ([made(*WRONG)] * 20, Cause.NEVER_SOLVED),
        ([made(*RIGHT)] * 9 + [made(*WRONG)] * 11, Cause.BY_TASK),
        ([made(*(0.2,) * 4), made(*(0.6,) * 4)] * 10, Cause.BY_TASK),  # partial credit, by the task alone
        ([made(*(0.43,) * 4)] * 20, Cause.NEVER_SOLVED),
        ([made(*WRONG, texts=1)] * 20, Cause.LOW_ENTROPY),
        ([made(*WRONG, logprob=-0.001)] * 20, Cause.LOW_ENTROPY),
        ([made(*RIGHT, texts=1)] * 9 + [made(*WRONG, texts=1)] * 11, Cause.MEMORISED),
        ([made(*WRONG)] * 6 + [made(*HALF)] * 4, None),  # enough is useful
        ([made(*WRONG)] * 7, None),  # too few to tell
    ],
)
def test_causes_are_told_apart(groups: list[TrajectoryGroup], cause: Cause | None) -> None:
    signal = of(*groups)
    assert signal.cause is cause
    assert signal.remedy == (REMEDIES[cause] if cause else "")
    assert len(signal.lines()) == (3 if cause else 1)


def test_the_numbers_are_those_of_the_groups() -> None:
    signal = of(made(*HALF), *[made(*RIGHT)] * 3, *[made(*WRONG, texts=2)] * 6)
    assert (signal.useful_share, signal.useful_token_share) == (0.1, 0.1)
    assert signal.share_sentence() == "10 % of 10 finished groups were useful (their rewards differ)"
    assert "33 % of those with equal rewards were solved by every episode, 67 % by none" in signal.diagnosis()
    assert "mean reward 0.33" in signal.diagnosis() and "middle difficulty" in signal.diagnosis()


def test_an_algorithm_without_a_baseline_uses_every_group() -> None:
    assert signal_of(made(*WRONG), needs_spread=False).useful == 1


def test_a_line_of_metrics_gives_the_signal_back() -> None:
    signal = of(made(*HALF), made(*WRONG, texts=1), made(*RIGHT))
    assert signal_in(signal.metrics()) == signal
    assert signal_in({}) == LearningSignal() and LearningSignal().metrics() == {}
