import pytest

from agentrl.env import Episode
from agentrl.types import Message, StopReason, Task, user
from envs.aime import AimePython


def episode(text: str, answer: str) -> Episode:
    task = Task(id="t", prompt="?", answer=answer)
    messages = (user("?"), Message(role="assistant", content=text))
    return Episode(task=task, messages=messages, stop_reason=StopReason.COMPLETED)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (r"\boxed{033}", 1.0),
        (r"\boxed{33}", 1.0),
        (r"\boxed{32+1}", 0.0),
        (r"\boxed{34}", 0.0),
        (r"\boxed{33} or rather \boxed{34}", 0.0),
        ("33", 0.0),
        ("", 0.0),
    ],
)
async def test_only_the_boxed_integer_counts(text: str, reward: float) -> None:
    assert await AimePython().score(episode(text, "33")) == {"correct": reward}


@pytest.mark.parametrize(
    ("gold", "text", "reward"),
    [
        ("1000", r"\boxed{1,000}", 1.0),
        ("-1", r"\boxed{1}", 0.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
    ],
)
async def test_gold_answers_that_aime_cannot_have_are_graded_as_math(gold: str, text: str, reward: float) -> None:
    assert await AimePython().score(episode(text, gold)) == {"correct": reward}


async def test_the_earlier_messages_do_not_count() -> None:
    first = episode(r"\boxed{33}", "33")
    messages = (*first.messages, user("sure?"), Message(role="assistant", content="yes"))
    later = Episode(task=first.task, messages=messages, stop_reason=StopReason.COMPLETED)
    assert await AimePython().score(later) == {"correct": 0.0}


def test_it_shares_the_interpreter_of_math_python() -> None:
    assert list(AimePython.tools) == ["python"]
