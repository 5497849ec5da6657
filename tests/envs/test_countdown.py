from collections import Counter
from itertools import islice

import pytest

from agentrl.errors import ConfigError
from envs.countdown import TARGETS, Countdown, CountdownNoTool, reaches
from envs.countdown_search import search
from envs.splits import NUM_TEST_TASKS


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("(3 + 5) * 7", True),
        ("7*(5+3)", True),
        (r"(3+5) \times 7", True),
        (r"\left( 3 + 5 \right) \cdot 7 = 56", True),
        ("7 × (3 + 5)", True),
        ("(3 + 5) * 7 = 57", False),
        ("(3 + 5) * 7 - 0", False),  # a number that was not given
        ("(3 + 4 + 1) * 7", False),
        ("7 * 8", False),  # not all of them
        ("7 * (3 + 5 + 5 - 5)", False),  # one of them twice
        ("56", False),
        ("-(-3 - 5) * 7", False),  # no signs
        ("3 ** 5 - 7", False),
        ("3 // 5 * 7", False),
        ("(3 + 5) * 7.0", False),
        ("0x3 + 5 + 7", False),
        ("(3 + 5) * 7 +", False),
        ("(3 + 5) * (7", False),
        ("03 + 5 * 7", False),
        ("3 5 7", False),
        ("__import__('os').getpid()", False),
        ("9**9**9**9", False),
        ("(" * 3000 + "1" + ")" * 3000, False),
        ("(" * 90 + "3" + ")" * 90 + "+5*7", False),
        ("", False),
        ("=56", False),
    ],
)
def test_an_expression_must_reach_the_target_with_each_number_once(answer: str, right: bool) -> None:
    assert reaches(answer, [3, 5, 7], 56) is right


@pytest.mark.parametrize(
    ("answer", "numbers", "target"),
    [
        (r"\frac{20}{\frac{8}{4}} + 1", [20, 8, 4, 1], 11),
        ("8/(3-8/3)", [8, 3, 8, 3], 24),
        (r"6 \div 3 - 1", [6, 3, 1], 1),
    ],
)
def test_fractions_are_exact(answer: str, numbers: list[int], target: int) -> None:
    assert reaches(answer, numbers, target)
    assert not reaches(answer, numbers, target + 1)


def test_division_by_zero_is_a_wrong_answer() -> None:
    assert not reaches("7/(3-3)", [7, 3, 3], 7)


def test_every_generated_problem_can_be_solved_as_its_answer_says() -> None:
    for task in islice(Countdown.tasks("train", seed=3), 300):
        numbers, target = task.metadata["numbers"], task.metadata["target"]
        assert target in TARGETS
        assert len(numbers) in (3, 4)
        assert reaches(task.answer or "", numbers, target), task
        assert str(target) in task.prompt


def test_the_search_finds_what_there_is_and_nothing_else() -> None:
    found = search([(3.0, "3"), (5.0, "5"), (7.0, "7")], 56)
    assert found is not None and reaches(found, [3, 5, 7], 56)
    assert search([(1.0, "1"), (1.0, "1")], 999) is None


def test_test_problems_never_come_in_training_whatever_the_order_of_the_numbers() -> None:
    def key(task) -> tuple[tuple[tuple[int, int], ...], int]:
        return tuple(sorted(Counter(task.metadata["numbers"]).items())), task.metadata["target"]

    held_out = {key(task) for task in Countdown.tasks("test", seed=1)}
    assert len(held_out) == NUM_TEST_TASKS
    assert held_out == {key(task) for task in CountdownNoTool.tasks("test", seed=2)}
    assert not held_out & {key(task) for task in islice(Countdown.tasks("train"), 3000)}


def test_seeds_change_the_training_problems() -> None:
    first, again, other = (next(iter(Countdown.tasks("train", seed=seed))).prompt for seed in (0, 0, 1))
    assert first == again != other


def test_rows_of_a_file_are_refused() -> None:
    with pytest.raises(ConfigError, match="Countdown generates its problems"):
        Countdown.tasks("train", data="rows.jsonl")
