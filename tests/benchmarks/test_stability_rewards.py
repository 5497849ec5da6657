"""The sweep over rewards: what is paid, that it resumes and pauses, and the tables from numbers worked by hand."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import calculator, stability_rewards, stability_train
from benchmarks.calculator import NO_ANSWER, Policy
from benchmarks.reporting import load_runs
from benchmarks.stability_payment import NOISE, paid
from benchmarks.stability_policy import stacked
from benchmarks.stability_rewards import KEY, cells, summary, sweep
from benchmarks.stability_rewards_report import difference, report
from benchmarks.stability_rollout import Episodes
from benchmarks.stability_rules import RULES
from benchmarks.stability_train import Spec, Stack, record


def untrained(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: value.detach() for name, value in Policy().state_dict().items()}


def terse(seed: int) -> dict[str, torch.Tensor]:
    """A policy that ends its episode at once, so that steps are cheap."""
    weights = untrained(seed)
    weights["head.weight"] = torch.zeros_like(weights["head.weight"])
    weights["head.bias"] = torch.full_like(weights["head.bias"], -50.0)
    weights["head.bias"][calculator.INDEX["$"]] = 50.0
    return weights


@pytest.fixture(autouse=True)
def _cheap_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability_train, "warm_start", untrained)
    torch.set_num_threads(1)


@pytest.mark.parametrize(("turn", "error"), [("A158$", 0), ("A150$", 8), ("A1158$", 1000), ("158$", NO_ANSWER)])
def test_the_error_of_an_answer(turn: str, error: int) -> None:
    assert calculator.error(turn, [11, 49, 98]) == error


RIGHT, ERROR = np.array([1, 0, 0, 0], np.float32), np.array([0, 10, 80, NO_ANSWER])


@pytest.mark.parametrize(
    ("payment", "expected"),
    [
        ("binary", [1, 0, 0, 0]),
        ("signed", [1, -1, -1, -1]),
        ("shaped", [1, 0.4, 0, 0]),
        ("floor", [1, 0.9, 0.9, 0]),
    ],
)
def test_payments_by_hand(payment: Any, expected: list[float]) -> None:
    assert paid(payment, RIGHT, ERROR, torch.Generator()).tolist() == pytest.approx(expected)


def test_one_episode_in_ten_is_graded_wrong_and_the_same_ones_under_every_rule() -> None:
    right, error = np.ones(20_000, np.float32), np.zeros(20_000, np.int64)
    found = [paid("noisy", right, error, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*found)
    assert 1 - float(found[0].mean()) == pytest.approx(NOISE, abs=0.01)


def test_rules_that_look_at_the_sign_refuse_noise() -> None:
    with pytest.raises(ValueError, match="rule grpo"):
        Spec(rule="grpo", lag=0, seed=0, lr=1e-3, num_steps=1, payment="noisy")


@lru_cache(maxsize=1)
def one_batch() -> Episodes:
    """Of an untrained policy: a third called right, a third near."""
    episodes = stability_train.sampled(stacked([untrained(3)]), [torch.Generator().manual_seed(3)])
    at = np.arange(episodes.reward_SU.shape[1])
    episodes.reward_SU[:] = at % 3 == 0
    episodes.error_SU[:] = np.where(at % 3 == 0, 0, np.where(at % 3 == 1, 10, NO_ANSWER))
    return episodes


def trained(rule: str, payment: Any) -> Stack:
    """One step on these episodes."""
    stack = Stack([Spec(rule=rule, lag=0, seed=3, lr=1e-3, num_steps=1, payment=payment)])
    stack.update(one_batch())
    return stack


@pytest.mark.parametrize("rule", ["opob_safe_leave_one_out", "scaled_mean"])
def test_a_rule_that_follows_the_group_makes_the_same_step_under_minus_one_and_one(rule: str) -> None:
    """Twice the gradient, which AdamW divides by its own size."""
    binary, signed = (trained(rule, payment) for payment in ("binary", "signed"))
    assert signed.steps[0][0].grad_norm == pytest.approx(2 * binary.steps[0][0].grad_norm, rel=1e-5)
    assert float((binary.weight_SP - signed.weight_SP).norm() / binary.weight_SP.norm()) < 1e-4
    assert signed.steps[0][0].reward == binary.steps[0][0].reward < 0.5  # the curve counts right answers


def test_without_a_baseline_the_step_is_another_one() -> None:
    binary, signed = (trained("zero", payment) for payment in ("binary", "signed"))
    assert float((binary.weight_SP - signed.weight_SP).norm() / binary.weight_SP.norm()) > 1e-3


def test_mean_and_leave_one_out_differ_by_eight_sevenths() -> None:
    mean, others = (trained(rule, "shaped").steps[0][0].grad_norm for rule in ("mean", "leave_one_out"))
    assert others == pytest.approx(mean * 8 / 7, rel=1e-5)


def test_groups_of_equal_rewards_have_no_part_where_a_run_drops_them() -> None:
    """Nobody is right, so `signed` pays -1 throughout."""
    episodes = replace(one_batch(), reward_SU=np.zeros_like(one_batch().reward_SU))
    for rule, num_groups in (("zero", 8), ("zero_dropped", 0)):
        stack = Stack([Spec(rule=rule, lag=0, seed=3, lr=1e-3, num_steps=1, payment="signed")])
        stack.update(episodes)
        assert stack.steps[0][0].num_groups == num_groups


def test_every_setting_is_run_once_and_the_deciding_ones_first() -> None:
    order = list(cells())
    assert len(order) == len(set(order)) == 9 * 5 * 3
    assert {rule for rule, _, _ in order} <= set(RULES)
    assert order[0] == ("opob_safe", "binary", 32)


def test_a_sweep_goes_on_where_it_was_and_waits_while_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability_rewards, "cells", lambda: iter([("zero", "floor", 0), ("opob_safe", "shaped", 0)]))
    monkeypatch.setattr(stability_rewards, "NUM_STEPS", 25)
    monkeypatch.setattr(stability_train, "warm_start", terse)
    out, pause = tmp_path / "runs.jsonl", tmp_path / "quiet"
    sweep(out, pause, [0])
    first = out.read_text()
    assert [run["rule"] for run in load_runs(out)] == ["zero", "opob_safe"]
    out.write_text(first.splitlines()[0] + "\n")
    pause.touch()
    monkeypatch.setattr(stability_rewards, "POLL_S", 0.01)
    threading.Timer(0.2, pause.unlink).start()
    sweep(out, pause, [0])
    assert out.read_text() == first
    assert not pause.exists()


def test_what_is_kept_of_a_run_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability_train, "warm_start", terse)
    stack = Stack([Spec(rule="opob_safe_leave_one_out", lag=0, seed=0, lr=1e-3, num_steps=25)])
    stack.run()
    (kept,) = (summary(dict(run)) for run in record(stack))
    assert [kept[name] for name in KEY] == ["binary", 0, "opob_safe_leave_one_out", 0, 1e-3, 25]
    assert len(kept["curve"]) == 5 and len(json.dumps(kept)) < 600


def finished(rule: str, seed: int, level: float, **changed: Any) -> dict[str, Any]:
    run = {"payment": "binary", "lag": 32, "rule": rule, "seed": seed, "lr": 1e-3, "num_steps": 200}
    measured = {"accuracy": level, "collapsed": level < 0.4, "fell": level < 0.4, "curve": [level] * 40}
    return {**run, **measured, "lowest_after_90": None, "down_share": 0.25, "shift": -0.1, **changed}


def test_differences_are_between_runs_of_a_seed() -> None:
    mine = [finished("opob", seed, level) for seed, level in ((0, 0.5), (1, 0.9), (7, 0.0))]
    reference = [finished("opob_safe", seed, level) for seed, level in ((0, 0.6), (1, 0.9), (2, 0.1))]
    assert difference(mine, reference) == pytest.approx((-0.05, -0.1, 0.0))
    assert difference(mine[:1], reference) is None


def test_the_page_says_how_much_of_the_sweep_there_is() -> None:
    runs = [finished(rule, seed, 0.3 + 0.6 * seed) for rule in ("opob", "opob_safe") for seed in (0, 1)]
    page = report(runs, 135)
    assert (
        "| `opob` | 2 | 1 | 1 | 0.60 (0.30 to 0.90) | never there | 0.600 | +0.000 (+0.000 to +0.000) | 25% | -0.10 |"
        in page
    )
    assert "Run so far: 2 of 135 settings." in page
    assert "## Lag 32, `binary`" in page and "`floor`" not in page
