"""The penalty on leaving a frozen model, TBA, distillation, imitation: numbers by hand, and autograd of each loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from trainer.objective import calls, reference_kl
from trainer.objective.interface import Group, Member, MemberWeights
from trainer.objective.registry import make_objective

LENGTHS = (3, 1, 4, 2)
REWARDS = (1.0, 0.0, 0.25, 1.0)


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def seeds(
    algorithm: AlgorithmConfig, logprobs: list[Tensor], references: list[Tensor], *, step: int = 0
) -> list[Tensor]:
    """w A + e of each token of one group of single-segment episodes, sampled by the policy itself."""
    objective = make_objective(algorithm)
    rewards = REWARDS[: len(logprobs)]
    group = Group(reward_E=float64(*rewards), num_actions_E=torch.tensor([len(one) for one in logprobs]), step=step)
    advantages = calls.advantages(objective, group)
    assert advantages is not None
    members = [
        Member(
            log_ratio_N=torch.zeros_like(logprob_N),
            advantage=float(advantage),
            reward=reward,
            group=0,
            episode=number,
            logprob_N=logprob_N.detach(),
            reference_logprob_N=reference_N,
            step=step,
        )
        for number, (logprob_N, reference_N, reward, advantage) in enumerate(
            zip(logprobs, references, rewards, advantages, strict=True)
        )
    ]
    found = calls.weigh(objective, members)
    return [_seed(weights, member) for weights, member in zip(found, members, strict=True)]


def _seed(weights: MemberWeights, member: Member) -> Tensor:
    seed_N = weights.weight_N * member.advantage
    return seed_N if weights.logprob_seed_N is None else seed_N + weights.logprob_seed_N


def test_tba_by_hand() -> None:
    """R (1, 0), d (0.2, -0.4), beta 0.5: log Z 1.1, residuals (-0.7, 0.7), A (0.35, -0.35)."""
    algorithm = AlgorithmConfig(preset="tba", kl_beta=0.5, kl_beta_end=None)
    first, second = seeds(algorithm, [float64(-1.0, -2.0), float64(-3.0)], [float64(-1.5, -1.7), float64(-2.6)])
    assert first.tolist() == pytest.approx([0.35, 0.35])
    assert second.tolist() == pytest.approx([-0.35])


def random_group(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    logprobs = [-torch.rand(n, generator=generator, dtype=torch.float64).requires_grad_() * 3 for n in LENGTHS]
    return logprobs, [-torch.rand(n, generator=generator, dtype=torch.float64) * 3 for n in LENGTHS]


@pytest.mark.parametrize("beta", [0.012, 2.0])
def test_tba_is_the_gradient_of_its_loss(beta: float) -> None:
    logprobs, references = random_group(0)
    leaves = [one.detach().requires_grad_() for one in logprobs]
    d_K = torch.stack([(one - reference).sum() for one, reference in zip(leaves, references, strict=True)])
    reward_K = float64(*REWARDS)
    log_z = (reward_K / beta - d_K).mean().detach()
    (log_z + d_K - reward_K / beta).square().mean().backward()
    found = seeds(AlgorithmConfig(preset="tba", kl_beta=beta, kl_beta_end=None), logprobs, references)
    for seed_N, leaf in zip(found, leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(seed_N * (-2 / (beta * len(LENGTHS))), leaf.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_a_term_is_the_gradient_of_its_loss_beside_the_policy_gradient(kl: str) -> None:
    logprobs, references = random_group(1)
    without = seeds(AlgorithmConfig(preset="grpo"), logprobs, references)
    found = seeds(AlgorithmConfig.model_validate({"preset": "grpo", "kl": kl, "kl_beta": 0.3}), logprobs, references)
    for seed_N, plain_N, logprob_N, reference_N in zip(found, without, logprobs, references, strict=True):
        leaf_N = logprob_N.detach().requires_grad_()
        r_N = reference_N - leaf_N
        loss_N = r_N.square() / 2 if kl == "k2" else r_N.exp() - r_N - 1
        (0.3 * loss_N).sum().backward()
        torch.testing.assert_close(seed_N - plain_N, -leaf_N.grad, rtol=1e-12, atol=1e-12)  # type: ignore[operator]


@pytest.mark.parametrize("kl", ["k2", "k3", "distill"])
def test_on_policy_a_terms_expectation_is_the_gradient_of_the_divergence(kl: str) -> None:
    """Over every action of one state, with its probability: KL(pi, ref) for k2 and distillation, KL(ref, pi) for k3."""
    generator = torch.Generator().manual_seed(2)
    theta, other = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(2))
    theta.requires_grad_()
    log_pi, log_ref = theta.log_softmax(0), other.log_softmax(0)
    exact = (log_ref.exp() * (log_ref - log_pi)).sum() if kl == "k3" else (log_pi.exp() * (log_pi - log_ref)).sum()
    settings = {"preset": "distill"} if kl == "distill" else {"preset": "reinforce", "kl": kl, "kl_beta": 1.0}
    algorithm = AlgorithmConfig.model_validate(settings)
    expected = torch.zeros_like(theta)
    for action in range(5):
        (seed_N,) = seeds(algorithm, [log_pi[action : action + 1]], [log_ref[action : action + 1]])
        seed = float(seed_N) - (REWARDS[0] if kl != "distill" else 0.0)  # the policy gradient itself has R = 1
        expected += (
            log_pi[action].exp().detach() * seed * torch.autograd.grad(log_pi[action], theta, retain_graph=True)[0]
        )
    torch.testing.assert_close(expected, -torch.autograd.grad(exact, theta)[0], rtol=1e-12, atol=1e-12)


def test_a_distilled_token_has_its_importance_weight() -> None:
    objective = make_objective(AlgorithmConfig(preset="distill"))
    member = Member(
        log_ratio_N=float64(0.5, 9.0),
        advantage=0.0,
        reward=1.0,
        group=0,
        logprob_N=float64(-1.0, -2.0),
        reference_logprob_N=float64(-1.5, -1.0),
    )
    (weights,) = calls.weigh(objective, [member])
    assert weights.logprob_seed_N is not None
    assert weights.logprob_seed_N.tolist() == pytest.approx([float(float64(0.5).exp()) * -0.5, 8.0 * 1.0])


def test_segments_of_an_episode_share_its_divergence() -> None:
    def member(episode: int, d: float) -> Member:
        return Member(
            log_ratio_N=torch.zeros(1),
            advantage=0.0,
            reward=0.0,
            group=3,
            episode=episode,
            logprob_N=float64(d),
            reference_logprob_N=float64(0.0),
            advantage_N=float64(0.25),  # of its one token
        )

    changed = reference_kl.with_penalty(
        [member(0, -0.25), member(1, -1.0), member(0, -0.75), member(4, -4.0)], 0.5, lambda d_E, _: d_E - d_E.mean()
    )
    assert [one.advantage for one in changed] == pytest.approx([-0.5, -0.5, -0.5, 1.0])  # d (-1, -1, -4), mean -2
    assert [float(one.token_advantage_N) for one in changed] == pytest.approx([-0.25, -0.25, -0.25, 1.25])


@pytest.mark.parametrize(("baseline", "advantage"), [("mean", 0.3 - 0.5 * 0.5), ("leave_one_out", 0.3 - 0.5 * 1.0)])
def test_an_episode_without_action_tokens_has_no_divergence_and_counts(baseline: str, advantage: float) -> None:
    algorithm = AlgorithmConfig.model_validate({"preset": "tba", "baseline": baseline, "kl_beta": 0.5})
    member = Member(
        log_ratio_N=torch.zeros(1),
        advantage=0.3,
        reward=1.0,
        group=0,
        num_episodes=2,
        logprob_N=float64(-1.0),
        reference_logprob_N=float64(-2.0),
    )  # d is 1, and 0 for the other episode
    (weights,) = calls.weigh(make_objective(algorithm), [member])
    assert _seed(weights, member).tolist() == pytest.approx([advantage])


def test_the_coefficient_is_annealed_by_the_step() -> None:
    annealed = {"preset": "reinforce", "kl": "k2", "kl_beta": 0.4, "kl_beta_end": 0.2, "kl_beta_steps": 4}
    logprobs, references = [float64(-1.0)], [float64(-3.0)]
    found = [
        float(seeds(AlgorithmConfig.model_validate(annealed), logprobs, references, step=step)[0]) for step in (0, 1, 9)
    ]
    assert found == pytest.approx([1 - 0.8, 1 - 0.7, 1 - 0.4])


def test_imitation_is_the_likelihood_of_what_exceeds_the_bound() -> None:
    logprobs, references = random_group(3)
    found = seeds(AlgorithmConfig(preset="imitate", imitate_above=0.2), logprobs, references)
    assert [one.tolist() for one in found] == [[1.0] * 3, [0.0], [1.0] * 4, [1.0] * 2]


@pytest.mark.parametrize(
    ("settings", "saying"),
    [
        ({"kl_beta": 0.1, "kl": "reward"}, "set kl: k2, or baseline: mean"),
        ({"preset": "grpo", "kl": "k2"}, "kl does nothing under kl_beta=0"),
        ({"preset": "grpo", "kl_beta": 0.1, "kl": "reward"}, "set kl: k2, or baseline: mean"),
        ({"preset": "otb", "kl_beta": 0.1, "kl": "reward"}, "set kl: k2, or baseline: mean"),
        ({"preset": "grpo", "kl_beta": 0.1, "kl_beta_steps": 7}, "kl_beta_steps does nothing without kl_beta_end"),
        ({"preset": "tba", "variance_every": 3}, "variance_every compares baselines"),
        ({"preset": "grpo", "imitate_above": 1.0}, "imitate_above does nothing"),
        ({"preset": "distill", "kl_beta": 1.0}, r"kl_beta=1\.0 does nothing under objective=distillation"),
        ({"preset": "distill", "treatment": "clip"}, "set treatment: truncate"),
        ({"preset": "distill", "baseline": "mean"}, "baseline=mean does nothing under objective=distillation"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], saying: str) -> None:
    with pytest.raises(ValidationError, match=saying):
        AlgorithmConfig.model_validate(settings)
