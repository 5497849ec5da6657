"""The enumeration against sums worked by hand, the product's own functions, and the derivation of docs/baselines.md."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from benchmarks import baselines
from benchmarks.baselines import RULES, Bandit, Floats, bandit, drawn, moments, noisy
from trainer.objective import baselines as of_product
from trainer.objective import vcpo

TWO_ARMS = bandit(np.array([0.5, 0.5]), np.array([0.25, 0.75]), np.array([1.0, 0.0]))
"""w = (2, 2/3), scores (1/2, -1/2) and its opposite; true gradient (1/4, -1/4)."""


def first(rule: str, **settings: float) -> float:
    return float(moments(TWO_ARMS, RULES[rule], group_size=2, **settings).mean_D[0])


def test_two_arms_and_groups_of_two_by_hand() -> None:
    """One of each has probability 3/8. q = w^2 n^2 is 2 and 2/9, so b* = 9/10.

    With b* the success has 2 * 0.1 / 2 and the failure 2/3 * 0.9 / 2 of its score: 3/8 (0.1 * 1/2 + 0.3 * 1/2). A
    group of equal draws has none. With the mean it is 3/8 (1/2 * 1/2 + 1/6 * 1/2). Of the others: 0 for the success, 1
    for the failure, and 3/8 (1 * 1/2 + 1/3 * 1/2) in all.
    """
    assert TWO_ARMS.gradient().tolist() == [0.25, -0.25]
    assert first("none") == pytest.approx(0.25)
    assert first("opob") == pytest.approx(3 / 8 * 0.4 / 2)
    assert first("mean") == first("opob_safe") == pytest.approx(3 / 8 * (1 / 4 + 1 / 12))
    assert first("opob_leave_one_out") == first("opob_safe_leave_one_out") == pytest.approx(0.25)
    assert first("none, equal groups dropped") == pytest.approx(0.25 * (1 - 0.25))


def test_the_variance_of_two_arms_by_hand() -> None:
    """Without a baseline: (1, -1)/2 by 2 / 2 for one success of two (3/8), twice that for two (1/16)."""
    second = 3 / 8 * 0.5 + 1 / 16 * 2.0
    assert moments(TWO_ARMS, RULES["none"], group_size=2).variance == pytest.approx(second - 2 * 0.25**2)


def test_cut_weights_by_hand() -> None:
    """w is cut to 1: the success gives 1/4 * 1 * 1/2, and a baseline b that looks at nobody b/2 (3/4 * 2/3 - 1/4)."""
    assert first("none", max_weight=1.0) == pytest.approx(1 / 8)
    constant = moments(TWO_ARMS, lambda w, n, reward: np.full_like(reward, 0.5), max_weight=1.0, group_size=2)
    assert constant.mean_D[0] == pytest.approx(1 / 8 + 0.5 / 2 * (3 / 4 * 2 / 3 - 1 / 4))


@pytest.mark.parametrize("rewards", ["binary", "signed", "floor", "real"])
def test_multisets_are_all_groups(rewards: str) -> None:
    one = drawn(np.random.default_rng(3), drift=1.0, rewards=rewards)
    norm_K, size = np.linalg.norm(one.score_KD, axis=1), 3
    total_D, total = np.zeros(4), 0.0
    for arms in itertools.product(range(4), repeat=size):
        at = np.array(arms)
        b_G = RULES["opob_safe"](one.weight_K[at][None], norm_K[at][None], one.reward_K[at][None])[0]
        estimate_D = (one.weight_K[at] * (one.reward_K[at] - b_G)) @ one.score_KD[at] / size
        chance = float(one.chance_K[at].prod())
        total_D += chance * estimate_D
        total += chance * float(estimate_D @ estimate_D)
    found = moments(one, RULES["opob_safe"], group_size=size)
    np.testing.assert_allclose(found.mean_D, total_D, atol=1e-13)
    assert found.variance == pytest.approx(total - total_D @ total_D)


PRODUCT = {
    "opob": vcpo.optimal_baseline,
    "opob_safe": vcpo.safe_baseline,
    "opob_leave_one_out": vcpo.leave_one_out_baseline,
    "opob_safe_leave_one_out": vcpo.safe_leave_one_out_baseline,
    "mean": lambda log_w, n, reward: of_product.mean(reward),
    "leave_one_out": lambda log_w, n, reward: of_product.leave_one_out(reward),
}


@pytest.mark.parametrize("rule", PRODUCT)
def test_the_rules_are_the_products(rule: str) -> None:
    generator = np.random.default_rng(0)
    w, n, reward = np.exp(generator.normal(size=(5, 8))), generator.random((5, 8)) + 0.1, generator.random((5, 8))
    for found, *numbers in zip(RULES[rule](w, n, reward), np.log(w), n, reward, strict=True):
        expected = PRODUCT[rule](*map(torch.from_numpy, numbers))
        assert expected is not None
        np.testing.assert_allclose(found, expected.expand(8).numpy(), rtol=1e-12)


def relative(one: Bandit, rule: str, max_weight: float = math.inf) -> Floats:
    return moments(one, RULES[rule], max_weight=max_weight).mean_D


def test_the_mean_shrinks_and_what_looks_at_others_alone_does_not() -> None:
    """docs/baselines.md, (1) and (2): 1 - 1/G for the mean; 1 for the three that leave one out; the two means are
    proportional in every group."""
    for seed in range(5):
        one = drawn(np.random.default_rng(seed), drift=1.5, rewards="binary")
        np.testing.assert_allclose(relative(one, "mean"), 7 / 8 * one.gradient(), atol=1e-12)
        for rule in ("leave_one_out", "opob_leave_one_out", "opob_safe_leave_one_out"):
            np.testing.assert_allclose(relative(one, rule), one.gradient(), atol=1e-12)
    scaled = moments(one, RULES["leave_one_out"]).variance / moments(one, RULES["mean"]).variance
    assert scaled == pytest.approx((8 / 7) ** 2)


def test_the_bias_of_b_star_is_each_draws_own_share_and_the_cap_takes_the_larger_of_two() -> None:
    """docs/baselines.md, (3), (4) and (5), group by group, with k_i = q_i / sum q."""
    generator = np.random.default_rng(1)
    w, n, reward = np.exp(generator.normal(size=(9, 8))), generator.random((9, 8)), generator.random((9, 8))
    q = (w * n) ** 2
    own = 1 - q / q.sum(1, keepdims=True)
    left = {name: reward - rule(w, n, reward) for name, rule in RULES.items()}
    np.testing.assert_allclose(left["opob"], own * left["opob_leave_one_out"], atol=1e-12)
    capped = np.maximum(own * left["opob_leave_one_out"], 7 / 8 * left["leave_one_out"])
    np.testing.assert_allclose(left["opob_safe"], capped, atol=1e-12)
    undamped = np.maximum(left["opob_leave_one_out"], left["leave_one_out"])
    np.testing.assert_allclose(left["opob_safe_leave_one_out"], undamped, atol=1e-12)


def test_cut_weights_leave_the_reward_above_the_baseline_of_what_was_cut() -> None:
    """docs/baselines.md, (7): a constant b gives gradient - E_pi[(1 - c/w)_+ (R - b) score], and b = R cures it."""
    one = drawn(np.random.default_rng(4), drift=1.5, rewards="binary")
    pi_K, cut_K = one.chance_K * one.weight_K, np.maximum(1 - 1.2 / one.weight_K, 0)
    assert cut_K.max() > 0
    for b in (0.0, 0.3, 1.0):
        found = moments(one, lambda w, n, reward, b=b: np.full_like(reward, b), max_weight=1.2).mean_D
        missing_D = (pi_K * cut_K * (one.reward_K - b)) @ one.score_KD
        np.testing.assert_allclose(found, one.gradient() - missing_D, atol=1e-12)


def test_dropped_groups_of_equal_rewards_shrink_what_has_no_baseline() -> None:
    """docs/baselines.md, (6): by 1 - p^(G-1), p the share of right draws under mu, where rewards are 0 and 1."""
    one = drawn(np.random.default_rng(2), drift=1.5, rewards="binary")
    right = float(one.chance_K @ one.reward_K)
    np.testing.assert_allclose(relative(one, "none, equal groups dropped"), (1 - right**7) * one.gradient(), atol=1e-12)


def test_the_cap_helps_where_a_success_dominates_and_not_where_a_failure_does() -> None:
    """The bandit of test_vcpo.py, groups of four, and the same with R -> 1 - R."""
    pi, mu, reward = np.array([0.5, 0.2, 0.2, 0.1]), np.array([0.1, 0.3, 0.3, 0.3]), np.array([1.0, 0.0, 0.0, 0.0])
    kept = {}
    for name, value in (("success", reward), ("failure", 1 - reward)):
        one = bandit(pi, mu, value)
        true_D = one.gradient()
        for rule in ("opob", "opob_safe", "opob_safe_leave_one_out"):
            got = moments(one, RULES[rule], group_size=4).mean_D
            kept[name, rule] = float(got @ true_D / (true_D @ true_D))
    assert kept["success", "opob"] == pytest.approx(0.327, abs=1e-3) == kept["failure", "opob"]
    assert kept["success", "opob_safe"] == pytest.approx(0.75)
    assert kept["failure", "opob_safe"] == pytest.approx(0.327, abs=1e-3)
    assert kept["success", "opob_safe_leave_one_out"] == pytest.approx(1)
    assert kept["failure", "opob_safe_leave_one_out"] == pytest.approx(1)


def test_noise_leaves_the_direction_of_the_true_gradient() -> None:
    one = drawn(np.random.default_rng(5), drift=1.0, rewards="binary")
    np.testing.assert_allclose(noisy(one, 0.1).gradient(), 0.8 * one.gradient(), atol=1e-12)


def test_the_report_has_a_table_a_setting_and_a_row_a_rule() -> None:
    page = baselines.report(baselines.SETTINGS[:2], num_draws=2)
    assert page.count("\n| opob_safe_leave_one_out | 1.00 | 1.00 | 1.00 | 1.00 | 0.00 |") == 2
    assert page.count("\n| none, equal groups dropped |") == 2
    assert page.index("## On-policy") < page.index("## Off-policy, weights as they are")
