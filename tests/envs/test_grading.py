import asyncio
import os
import signal

import pytest

from agentrl.errors import EnvError, MissingDependencyError
from envs import equality_pool
from envs.equality_pool import EqualityPool
from envs.grading import aime_integer, final_answer, is_correct, normalised


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{33}.", "33"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{7} and \boxed{8", "7"),
        (r"\boxed{a\boxed{5}}", "5"),
        ("we need 33 boxes", None),
        ("the answer is 33", None),
        (r"<think>\boxed{1}</think> it is \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> who knows", None),
        (r"<think>perhaps \boxed{1}", None),
        (r"\boxed{1} <think>or \boxed{2}", "1"),
        (r"\boxed{\text{a } \{ b}", r"\text{a } \{ b"),
        (r"\boxed{" * 2000 + "1" + "}" * 2000, "1"),
        (r"\boxed{" * 5000, None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_balanced_box_after_the_thought_is_the_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("box", "value"),
    [("25", 25), ("025", 25), ("0", 0), ("999", 999), ("0000999", 999), ("1000", None), ("-3", None), ("+3", None),
     ("25.0", None), ("32+1", None), ("1,005", None), ("", None), ("٣", None), (" 7 ", 7), ("7\n8", None)],
)  # fmt: skip
def test_aime_takes_integers_from_0_to_999_and_nothing_else(box: str, value: int | None) -> None:
    assert aime_integer(f"\\boxed{{{box}}}") == value


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("25", "025", True),
        ("25", "25.", True),
        ("25", "$25$", True),
        ("25", "25.0", True),
        ("25", "25.0.0", False),
        ("25", "25.5", False),
        ("25", r"\$25.00", True),
        ("25", r"\text{25}", True),
        ("25", r"25\text{ apples}", True),
        ("25", r"25\,\mathrm{cm}^2", True),
        ("25", r"25\%", True),
        ("25", r"25^\circ", True),
        ("25", "x = 25", True),
        ("25", r"25 \text{ or } 26", False),
        ("25", r"\frac{50}{2}", False),
        ("25", "5^2", False),
        ("25", "0b11001", False),
        ("25", "2.5e1", False),
        ("25", "2 5", False),
        ("25", "25, 26", False),
        ("25", "25 " * 5000, False),
        ("-3", "−3", True),
        ("1000000", "1,000,000.00", True),
        ("25", "-25", False),
        ("25", "24+1", False),
        ("25", r"\sum_{k=1}^{25} 1", False),
        ("-3", "-3", True),
        ("-3", "3", False),
        ("1005", "1,005", True),
        ("1005", r"1{,}005", True),
        ("1,005", "1005", True),
        ("1005", "1,5", False),
        ("105", "1,05", False),
        ("7", "9" * 5000, False),
        (r"62^\circ", "62", True),
        (r"\text{Tuesday}", "Tuesday", True),
        (r"\text{Tuesday}", r"\text{Wednesday}", False),
        ("4, 0, -4", "4,0,-4", True),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"\left(0, 1\right)", "(0,1)", True),
        (r"\$18.90", "18.90", True),
        (r"\frac{1}{2}", "", False),
    ],
)
async def test_answers_that_need_no_symbolic_equality(gold: str, answer: str, right: bool) -> None:
    assert await is_correct(f"thus \\boxed{{{answer}}}", gold) is right


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (r"\frac{1}{2}", "0.5", True),
        ("x^2+1", "1+x^2", True),
        ("4, 0, -4", "-4, 0, 4", True),
        ("(0,1)", "[0,1]", False),
        (r"\sqrt{2}", "1.5", False),
        (r"\frac{3}{4}", r"\sum_{k=1}^{999999999} k", False),
        (r"\frac{3}{4}", "1" * 3000, False),
        (r"\frac{3}{4}", r"\left(((((", False),
        (r"\frac{3}{4}", "0.75, 0.75", False),
        (r"\frac{3}{4}", r"\frac{3}{4} \text{ or } \frac{1}{4}", False),
        (r"\frac{3}{4}", r"75\%", True),
        (r"1{,}000.5", "1,000.5", True),
        ("[0,1)", "(0,1]", False),
        (r"\frac{3}{4}", r"\frac{1}{0}", False),
    ],
)
async def test_symbolic_equality(gold: str, answer: str, right: bool) -> None:
    assert await is_correct(f"\\boxed{{{answer}}}", gold) is right


async def test_an_answer_without_end_is_wrong_and_the_next_one_is_graded() -> None:
    assert not await is_correct(r"\boxed{10^{10^{10}}}", r"\frac{3}{4}")
    assert await is_correct(r"\boxed{0.75}", r"\frac{3}{4}")


async def test_many_answers_are_graded_at_once_off_the_main_thread() -> None:
    results = await asyncio.gather(*[is_correct(f"\\boxed{{{i}/4}}", r"\frac{3}{4}") for i in range(20)])
    assert [i for i, right in enumerate(results) if right] == [3]


async def test_a_blank_gold_answer_is_never_matched() -> None:
    with pytest.raises(EnvError, match="blank"):
        await is_correct(r"\boxed{}", "")


def test_a_grader_that_hangs_is_a_failure_not_a_zero() -> None:
    pool = EqualityPool(1, wall_limit_s=30)
    assert pool.equal(r"\frac{1}{2}", "0.5")
    pool._wall_limit_s = 0.3
    worker = pool._idle.get()
    assert worker is not None
    os.kill(worker._process.pid, signal.SIGSTOP)
    pool._idle.put(worker)
    with pytest.raises(EnvError, match="no answer"):
        pool.equal(r"\frac{1}{2}", "0.5")
    assert not worker.is_alive


def test_a_grader_that_dies_is_a_failure_and_replaced() -> None:
    pool = EqualityPool(1)
    assert pool.equal(r"\frac{1}{2}", "0.5")
    worker = pool._idle.get()
    assert worker is not None
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    pool._idle.put(worker)
    with pytest.raises(EnvError, match="grader"):
        pool.equal(r"\frac{1}{2}", "0.5")
    assert pool.equal(r"\frac{1}{2}", "0.5")
    pool.close()


def test_workers_end_with_their_owner() -> None:
    pool = EqualityPool(1)
    assert pool.equal(r"\frac{1}{2}", "0.5")
    worker = pool._idle.get()
    assert worker is not None and worker._process.stdin is not None
    worker._process.stdin.close()  # what the kernel does when the owner dies
    assert worker._process.wait(timeout=10) == 0


def test_a_missing_math_verify_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality_pool.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install -e .*\[grading\]"):
        EqualityPool(1).equal("x", "y")


def test_normalised_text_keeps_what_matters() -> None:
    assert normalised(r"\text{(A)}") == "(A)"
    assert normalised("-1") != normalised("1")
    assert normalised(r"\frac12") != normalised(r"\frac21")
