"""Ratios, treatments and baselines against numbers worked by hand, and properties for any input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.presets import PRESETS
from trainer.objective import Group, Member, MemberWeights, PolicyGradient, baselines, calls, make_objective, ratios

LOG_RATIOS = st.lists(st.floats(-1e4, 1e4), max_size=8)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def objective(**settings: Any) -> Any:
    return make_objective(AlgorithmConfig(**settings))


def advantages(algorithm: PolicyGradient, reward_E: torch.Tensor, num_actions_E: torch.Tensor) -> torch.Tensor | None:
    return algorithm.advantages(Group(reward_E=reward_E, num_actions_E=num_actions_E))


def weights(algorithm: PolicyGradient, log_ratio_N: torch.Tensor, advantage: float) -> MemberWeights:
    return algorithm.weights(Member(log_ratio_N=log_ratio_N, advantage=advantage, reward=1.0, group=0))


def member(*log_ratio: float, advantage: float = 1.0, reward: float = 1.0, group: int = 0) -> Member:
    return Member(
        log_ratio_N=f64(*log_ratio),
        advantage=advantage,
        reward=reward,
        group=group,
        logprob_N=f64(*log_ratio) - 1,
        logit_norm2_N=torch.full((len(log_ratio),), 0.5, dtype=torch.float64),
        reference_logprob_N=torch.full((len(log_ratio),), -1.0, dtype=torch.float64),
    )


# Ratios


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [("token", (0.5, 1.0, 1.5)), ("sequence", (3.0,) * 3), ("geometric_mean", (1.0,) * 3), ("none", (0.0,) * 3)],
)
def test_what_the_weight_is_taken_of(ratio: Any, expected: tuple[float, ...]) -> None:
    torch.testing.assert_close(ratios.log_weights(f64(0.5, 1.0, 1.5), ratio), f64(*expected))


def test_a_long_episode_sums_in_float64() -> None:
    found = weights(objective(), torch.full((100_000,), 0.1, dtype=torch.float64) - 0.1 + 1e-9, 1.0)
    assert found.log_weight == pytest.approx(1e-4, rel=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_action_tokens_weigh_one_and_have_no_weights(preset: Any) -> None:
    algorithm = objective(preset=preset)
    silent, _ = calls.weigh(algorithm, [member(), member(0.1, 0.2)])
    assert (len(silent.weight_N), silent.log_weight, silent.num_clipped, silent.num_weights) == (0, 0.0, 0, 0)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_group_that_never_acted_is_defined(preset: Any) -> None:
    algorithm = objective(preset=preset)
    assert all(len(found.weight_N) == 0 for found in calls.weigh(algorithm, [member(), member()]))
    assert bool((algorithm.lengths(torch.tensor([0, 0])) > 0).all())
    advantage_G = advantages(algorithm, f64(1.0, 0.0), torch.tensor([0, 0]))
    assert advantage_G is not None and bool(advantage_G.isfinite().all())


# Treatments


@pytest.mark.parametrize(("log_weight", "expected"), [(1e4, 8.0), (math.log(9), 8.0), (math.log(7), 7.0), (-1e4, 0.0)])
def test_truncation_never_overflows(log_weight: float, expected: float) -> None:
    found = weights(objective(), f64(log_weight), 1.0)
    assert found.weight_N.item() == pytest.approx(expected)
    assert found.num_clipped == (log_weight > math.log(8))


@pytest.mark.parametrize(("log_weight", "expected"), [(1e4, 0.0), (math.log(9), 0.0), (math.log(7), 7.0), (-1e4, 0.0)])
def test_masking_leaves_the_large_out(log_weight: float, expected: float) -> None:
    assert weights(objective(preset="mis"), f64(log_weight), 1.0).weight_N.item() == pytest.approx(expected)


def test_masking_below_the_lower_end() -> None:
    found = weights(objective(preset="mis", ratio="token", min_weight=0.5), f64(0.4, 0.6).log(), 1.0)
    torch.testing.assert_close(found.weight_N, f64(0.0, 0.6))
    assert (found.num_clipped, found.num_weights) == (1, 2)


@pytest.mark.parametrize(
    ("advantage", "expected"), [(1.0, (0.5, 0.9, 1.1, 0.0)), (-1.0, (0.0, 0.9, 1.1, 1.5)), (0.0, (0.0, 0.9, 1.1, 1.5))]
)
def test_ppo_cuts_only_what_has_gone_far_enough_in_the_direction_of_the_advantage(
    advantage: float, expected: tuple[float, ...]
) -> None:
    found = weights(objective(preset="grpo"), f64(0.5, 0.9, 1.1, 1.5).log(), advantage)
    torch.testing.assert_close(found.weight_N, f64(*expected))


def test_a_dual_clip_cuts_large_ratios_of_negative_advantages_too() -> None:
    algorithm, log_ratio = objective(preset="grpo", dual_clip=3.0), f64(0.5, 1.5, 2.9, 3.1, 1e9).log()
    torch.testing.assert_close(weights(algorithm, log_ratio, -1.0).weight_N, f64(0.0, 1.5, 2.9, 0.0, 0.0))
    torch.testing.assert_close(weights(algorithm, log_ratio, 1.0).weight_N, f64(0.5, 0.0, 0.0, 0.0, 0.0))


def test_cispo_keeps_every_token() -> None:
    found = weights(objective(preset="cispo", clip_low=0.5, clip_high=1.0), f64(0.1, 1.5, 9.0).log(), 1.0)
    torch.testing.assert_close(found.weight_N, f64(0.5, 1.5, 2.0))
    assert found.num_clipped == 2


def test_the_second_moment_is_under_its_bound_with_the_least_left_out() -> None:
    # Squares .01 .01 .04 .25: the mean of all is .0775, of the first three .02.
    log_ratio, advantage = f64(0.1, -0.1, 0.5, -0.2), f64(1.0, -1.0, 2.0, -0.5)
    assert ratios.second_moment_mask(log_ratio, advantage, 0.04).tolist() == [True, True, False, True]


def test_the_second_moment_is_taken_among_tokens_that_ppos_clip_can_act_on() -> None:
    """All other tokens are kept and do not count in the mean, here that of 1e-6 and .09, which is above .04."""
    log_ratio, advantage = f64(-3.0, 3.0, 3.0, 0.0, 0.001, 0.3), f64(1.0, -1.0, 0.0, 1.0, 1.0, 1.0)
    assert ratios.second_moment_mask(log_ratio, advantage, 0.04).tolist() == [True] * 5 + [False]


def test_m2pos_cap_by_hand() -> None:
    """Squares .01 .04 .09 .25 of tokens that the clip can act on. Capped at .09 their mean is .0575, at .04 it is
    .0325: those above .04 are cut, where the mask leaves out .25 alone (the mean of the others is .0467) and .09."""
    log_ratio, advantage = f64(0.1, -0.2, 0.3, -0.5, 0.6), f64(1.0, -1.0, 2.0, -0.5, -1.0)
    assert ratios.second_moment_clip(log_ratio, advantage, 0.04).tolist() == [True, True, False, False, True]
    assert ratios.second_moment_mask(log_ratio, advantage, 0.05).tolist() == [True, True, True, False, True]
    assert ratios.second_moment_clip(log_ratio, advantage, 0.05).tolist() == [True, True, False, False, True]
    assert ratios.second_moment_clip(log_ratio, advantage, 0.1).tolist() == [True] * 5
    assert ratios.second_moment_clip(log_ratio, advantage, 0.001).tolist() == [False] * 4 + [True]


def test_m2pos_cap_cuts_nearly_twice_as_many_tokens_as_the_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    log_ratio = 0.3 * torch.randn(100_000, dtype=torch.float64, generator=generator)
    advantage = torch.randn(100_000, dtype=torch.float64, generator=generator)
    cut = [
        1 - float(rule(log_ratio, advantage, 0.04).double().mean())
        for rule in (ratios.second_moment_clip, ratios.second_moment_mask)
    ]
    assert cut == pytest.approx([0.188, 0.101], abs=2e-3)


@given(st.lists(st.tuples(st.floats(-5, 5), st.sampled_from([-1.0, 0.0, 1.0])), max_size=12), st.randoms())
@pytest.mark.parametrize("rule", [ratios.second_moment_mask, ratios.second_moment_clip])
def test_the_second_moment_does_not_depend_on_the_order(
    rule: Any, tokens: list[tuple[float, float]], random: Any
) -> None:
    def mask(of: list[tuple[float, float]]) -> list[bool]:
        found: list[bool] = rule(f64(*(x for x, _ in of)), f64(*(a for _, a in of)), 0.04).tolist()
        return found

    keep = mask(tokens)
    kept = [x for (x, advantage), stays in zip(tokens, keep, strict=True) if stays and x * advantage > 0]
    assert sum(x * x for x in kept) <= 0.04 * len(kept) + 1e-12
    order = list(range(len(tokens)))
    random.shuffle(order)
    assert mask([tokens[i] for i in order]) == [keep[i] for i in order]


def test_adaptive_bounds_stand_where_they_start_when_the_loss_is_balanced() -> None:
    settings = {"low": (0.6, 0.9), "high": (1.2, 3.0), "step": (0.05, 0.1), "positive_share": 0.5}
    assert ratios.adaptive_bounds(f64(0.0, 0.0), f64(1.0, -1.0), **settings) == ratios.Bounds(low=0.6, high=1.2)
    # 1.5 is cut to 1.2 against a loss of 1.3: only a higher upper bound helps, and it is raised after the lower one.
    found = ratios.adaptive_bounds(f64(math.log(1.5), 0.0), f64(1.0, -1.3), **settings)
    assert (found.low, found.high) == (0.9, pytest.approx(1.3))  # one step of 0.1
    assert ratios.adaptive_bounds(f64(0.0), f64(-1.0), **settings) == ratios.Bounds(low=0.9, high=3.0)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_broken_logprob_is_never_hidden(preset: Any, broken: float) -> None:
    """Its trajectory's log weight, by which the step is refused, is not finite; nothing raises, nothing loops."""
    found, other = calls.weigh(objective(preset=preset), [member(0.1, broken), member(0.1, 0.2, reward=0.0)])
    assert not math.isfinite(found.log_weight)
    assert math.isfinite(other.log_weight)


def test_an_untreated_weight_that_leaves_float32_is_infinite_so_that_the_step_is_refused() -> None:
    found = weights(objective(treatment="none"), f64(81.0), 1.0)
    assert found.weight_N.item() == math.inf
    assert weights(objective(treatment="none"), f64(79.0), 1.0).weight_N.isfinite().all()


@pytest.mark.parametrize("preset", ["grpo", "dapo", "gspo", "m2po"])
def test_a_huge_ratio_is_cut_where_it_is_rewarded_and_refuses_the_step_where_it_is_not(preset: Any) -> None:
    """A gap in PPO's clip: with A < 0 a large weight is not cut, and this one is infinite."""
    rewarded, punished = calls.weigh(
        objective(preset=preset), [member(1e4, advantage=1.0), member(1e4, advantage=-1.0)]
    )
    assert (rewarded.weight_N.item(), punished.weight_N.item()) == (0.0, math.inf)


BOUNDED = ["vcpo_safe", "vcpo", "vcpo_published", "tis", "mis", "cispo", "m2po", "rloo", "opo", "otb", "reinforce"]


@given(st.lists(LOG_RATIOS, min_size=1, max_size=4), st.sampled_from(BOUNDED))
def test_treated_weights_are_finite_whatever_the_ratios(rows: list[list[float]], preset: Any) -> None:
    for found in calls.weigh(objective(preset=preset), [member(*row) for row in rows]):
        assert bool(found.weight_N.isfinite().all())
        assert not math.isnan(found.log_used)
        assert 0 <= found.num_clipped <= found.num_weights


@given(LOG_RATIOS.filter(len), st.sampled_from(["sequence", "geometric_mean"]))
def test_one_weight_of_a_trajectory_is_the_same_at_every_token(row: list[float], ratio: Any) -> None:
    found = weights(objective(ratio=ratio), f64(*row), 1.0)
    assert bool((found.weight_N == found.weight_N[0]).all())
    assert found.weight_N[0].item() == pytest.approx(math.exp(found.log_used))


@given(st.permutations(list(range(5))), st.sampled_from(sorted(PRESETS)))
def test_weights_do_not_depend_on_the_order_of_the_batch(order: list[int], preset: Any) -> None:
    rows = [(0.3, -0.2), (0.9,), (-0.5, 0.1, 0.4), (0.05, 0.6), (1.2, -1.0)]
    batch = [member(*row, advantage=0.5 - i % 2, reward=i % 2, group=i // 3) for i, row in enumerate(rows)]
    whole = calls.weigh(objective(preset=preset), batch)
    for i, found in zip(order, calls.weigh(objective(preset=preset), [batch[i] for i in order]), strict=True):
        torch.testing.assert_close(found.weight_N, whole[i].weight_N, rtol=1e-12, atol=1e-12)


# Baselines, scales, lengths


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    torch.testing.assert_close(baselines.leave_one_out(f64(1.0, 0.0, 0.5)), f64(0.25, 0.75, 0.5))


def test_leave_one_out_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="two"):
        baselines.leave_one_out(f64(1.0))


def test_length_weighted_by_hand() -> None:
    # (3 * 1 + 1 * 0) / 4
    torch.testing.assert_close(baselines.length_weighted(f64(1.0, 0.0), torch.tensor([3, 1])), f64(0.75, 0.75))


def test_the_token_baseline_by_hand() -> None:
    # Energies W: (1, 2), (3, 4), (4,): b = (1 + 0 + 4*.5)/8 at t = 0; the third has ended at t = 1: (2 + 0)/6.
    weights, norms = [f64(1.0, 1.0), f64(1.0, 1.0), f64(1.0)], [f64(1.0, 1.0), f64(3.0, 1.0), f64(4.0)]
    first, second, third = baselines.optimal_token(f64(1.0, 0.0, 0.5), weights, norms)
    torch.testing.assert_close(first, f64(0.375, 1 / 3))
    torch.testing.assert_close(second, f64(0.375, 1 / 3))
    torch.testing.assert_close(third, f64(0.375))


def test_the_tail_of_the_one_longest_member_has_no_token_baseline() -> None:
    """Its own reward would be its baseline there, and the tail would have no gradient."""
    first, second = baselines.optimal_token(
        f64(1.0, 0.0), [f64(1.0, 1.0, 1.0), f64(1.0)], [f64(1.0, 1.0, 1.0), f64(3.0)]
    )
    torch.testing.assert_close(first, f64(0.25, 0.0, 0.0))
    torch.testing.assert_close(second, f64(0.25))
    (alone,) = baselines.optimal_token(f64(1.0), [f64(1.0, 1.0)], [f64(1.0, 1.0)])
    torch.testing.assert_close(alone, f64(1.0, 1.0))


def test_the_token_baseline_of_certain_tokens_is_the_mean() -> None:
    first, _ = baselines.optimal_token(f64(1.0, 0.0), [f64(1.0), f64(1.0)], [f64(0.0), f64(0.0)])
    torch.testing.assert_close(first, f64(0.5))


def test_the_logit_norm_is_that_of_the_softmax_gradient() -> None:
    logits = f64(0.3, -1.0, 2.0).requires_grad_()
    logprob = logits.log_softmax(0)
    gradient = torch.autograd.grad(logprob[1], logits)[0]
    found = baselines.logit_norm2(logprob[1:2].detach(), logprob.detach().exp().square().sum()[None])
    torch.testing.assert_close(found, gradient.square().sum()[None])


COMPARING = sorted(name for name in PRESETS if AlgorithmConfig(preset=name).needs_spread)


@pytest.mark.parametrize("preset", COMPARING)
def test_equal_rewards_and_single_members_have_no_gradient_under_a_baseline(preset: Any) -> None:
    assert advantages(objective(preset=preset), f64(0.7, 0.7, 0.7), torch.tensor([1, 2, 3])) is None
    assert advantages(objective(preset=preset), f64(0.7), torch.tensor([1])) is None


@pytest.mark.parametrize("preset", PRESETS)
def test_an_empty_group_is_defined(preset: Any) -> None:
    advantage_G = advantages(objective(preset=preset), f64(), torch.tensor([]))
    assert advantage_G is None or len(advantage_G) == 0
    assert len(objective(preset=preset).lengths(torch.tensor([]))) == 0


def test_without_a_baseline_equal_rewards_are_followed() -> None:
    advantage_G = advantages(objective(preset="reinforce"), f64(0.7, 0.7), torch.tensor([1, 2]))
    assert advantage_G is not None and advantage_G.tolist() == [0.7, 0.7]


def test_advantages_over_the_standard_deviation() -> None:
    advantage_G = advantages(objective(preset="grpo"), f64(1.0, 0.0, 0.5), torch.tensor([1, 1, 1]))
    assert advantage_G is not None
    torch.testing.assert_close(advantage_G, f64(1.0, -1.0, 0.0))
    assert objective(preset="grpo").score_scale(f64(1.0, 0.0, 0.5)) == pytest.approx(2.0)
    published = objective(preset="grpo", normalize_by_std="population")
    assert published.score_scale(f64(1.0, 0.0, 0.0, 1.0)) == pytest.approx(2.0)


def test_rewards_that_only_round_differently_are_equal() -> None:
    """1e-17 apart, and over their standard deviation a whole advantage apart."""
    reward_G = f64(0.1 + 0.2, 0.3, 0.3, 0.3)
    for preset in COMPARING:
        assert advantages(objective(preset=preset), reward_G, torch.tensor([5] * 4)) is None
    assert objective(preset="reinforce", normalize_by_std=True).score_scale(reward_G) == 1.0


@pytest.mark.parametrize(
    ("settings", "largest"),
    [
        ({"baseline": "opob"}, 8**2),
        ({"preset": "vcpo"}, 40**2),
        ({"preset": "vcpo", "baseline_weights": "product"}, (8 * 40) ** 2),
    ],
    ids=["treated", "the paper", "its code"],
)
def test_the_optimal_baseline_takes_the_weights_of_the_gradient_or_as_the_paper_writes_it_whole_ones(
    settings: Any, largest: float
) -> None:
    algorithm, norm, reward = objective(**settings), f64(0.3, 1.0, 1.0, 1.0), f64(1.0, 0.0, 0.0, 0.0)
    found = [weights(algorithm, f64(math.log(weight)), 1.0) for weight in (40.0, 1.0, 1.0, 1.0)]
    optimum = algorithm.baseline(f64(*map(algorithm.log_in_baseline, found)), norm, reward)
    assert optimum is not None and optimum.item() == pytest.approx(largest * 0.09 / (largest * 0.09 + 3))


@pytest.mark.parametrize(("norm_of", "expected"), [("sum", 1 / 16), ("mean", 0.625)])
def test_the_norm_of_the_sum_follows_length_and_that_of_the_mean_its_inverse(norm_of: Any, expected: float) -> None:
    """Equal weights, squared norms of sums proportional to length, one success of 200 tokens, failures of 1,000."""
    algorithm, reward = objective(preset="vcpo", norm_of=norm_of), f64(1.0, 0.0, 0.0, 0.0)
    lengths = (200, 1000, 1000, 1000)
    norms = [algorithm.norm_in_baseline(math.sqrt(length) / length, length) for length in lengths]
    optimum = algorithm.baseline(f64(0.0, 0.0, 0.0, 0.0), f64(*norms), reward)
    assert optimum is not None and optimum.item() == pytest.approx(expected)


def test_what_is_masked_has_no_part_in_the_optimal_baseline_under_whole_weights() -> None:
    algorithm = objective(preset="vcpo", treatment="mask")
    assert algorithm.log_in_baseline(weights(algorithm, f64(math.log(40.0)), 1.0)) == -math.inf


@pytest.mark.parametrize(("by_length", "expected"), [(True, (2, 1, 6)), (False, (1, 1, 1)), ("group", (8 / 3,) * 3)])
def test_lengths(by_length: Any, expected: tuple[float, ...]) -> None:
    found = objective(normalize_by_length=by_length).lengths(torch.tensor([2, 0, 6]))
    torch.testing.assert_close(found, f64(*expected))


@pytest.mark.parametrize(
    ("by_length", "expected"), [(True, (2, 8, 6, 6)), (False, (1, 2, 2, 1)), ("group", (5.0,) * 4)]
)
def test_lengths_of_an_episode_in_two_segments_and_of_a_masked_one(by_length: Any, expected: tuple[float, ...]) -> None:
    """`group` is 15 tokens over 3 episodes: every token counts alike, whichever segment it is in."""
    found = objective(normalize_by_length=by_length).lengths(
        torch.tensor([2, 4, 3, 6]), share_G=f64(1.0, 0.5, 0.5, 0.0), num_episodes=3
    )
    torch.testing.assert_close(found, f64(*expected))


def test_norms_are_asked_for_only_where_a_baseline_uses_them() -> None:
    assert [name for name in PRESETS if objective(preset=name).needs_norms] == ["vcpo_safe", "vcpo", "vcpo_published"]
    with pytest.raises(ValueError, match="does not depend"):
        objective(preset="grpo").baseline(f64(0.0), f64(1.0), f64(1.0))


# Divergence


def test_behavior_kl_is_zero_on_policy_and_matches_the_exact_divergence_in_expectation() -> None:
    mu, pi = f64(0.5, 0.3, 0.2), f64(0.2, 0.5, 0.3)
    assert ratios.behavior_kl(f64(0.0)).item() == 0.0
    estimate = (mu * ratios.behavior_kl((pi / mu).log())).sum()
    torch.testing.assert_close(estimate, (mu * (mu / pi).log()).sum())


def test_behavior_kl_stays_finite() -> None:
    assert torch.isfinite(ratios.behavior_kl(f64(1e4, -1e4))).all()
