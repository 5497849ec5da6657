"""Every preset against its paper's objective, written out here and differentiated by autograd in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.presets import OPTIMAL, PRESETS
from agentrl.config.reference import find
from tests.trainer.softmax_policy import Episode, Groups, float64, groups, logprobs, objective_gradient, policy, score
from trainer.objective import Group, Member, PolicyGradient

References = dict[str, Callable[[Tensor, Groups], Tensor]]


def ratio(theta: Tensor, episode: Episode) -> Tensor:
    """r_t = pi / mu, with its graph."""
    return (logprobs(theta, episode) - episode.behavior).exp()


def rewards(group: list[Episode]) -> Tensor:
    return float64([episode.reward for episode in group])


def group_relative(group: list[Episode]) -> Tensor:
    """A_i = (R_i - mean) / std; 0 for a group of equal rewards."""
    reward = rewards(group)
    return (reward - reward.mean()) / reward.std() if reward.std() > 0 else torch.zeros_like(reward)


def gradient_of_mean(theta: Tensor, batch: Groups, of_group: Callable[[list[Episode]], Tensor]) -> Tensor:
    return score(theta, torch.stack([of_group(group) for group in batch]).mean())


def pessimistic(weight: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """min(w A, clip(w, low, high) A)"""
    return torch.minimum(weight * advantage, weight.clamp(low, high) * advantage)


def grpo(theta: Tensor, batch: Groups) -> Tensor:
    """J = 1/G sum_i 1/|o_i| sum_t min(r A, clip(r, 1 - eps, 1 + eps) A)    DeepSeekMath, arXiv 2402.03300"""

    def of_group(group: list[Episode]) -> Tensor:
        advantage = group_relative(group)
        return torch.stack(
            [pessimistic(ratio(theta, e), a, 0.8, 1.2).mean() for e, a in zip(group, advantage, strict=True)]
        ).mean()

    return gradient_of_mean(theta, batch, of_group)


def dapo(theta: Tensor, batch: Groups) -> Tensor:
    """J = 1/sum|o_i| sum_i sum_t min(r A, clip(r, 1 - 0.2, 1 + 0.28) A)    DAPO, arXiv 2503.14476"""

    def of_group(group: list[Episode]) -> Tensor:
        advantage = group_relative(group)
        stats = [pessimistic(ratio(theta, e), a, 0.8, 1.28) for e, a in zip(group, advantage, strict=True)]
        return torch.cat(stats).mean()

    return gradient_of_mean(theta, batch, of_group)


def gspo(theta: Tensor, batch: Groups) -> Tensor:
    """J = 1/G sum_i min(s A, clip(s) A), s = (pi(y) / mu(y))^(1/|y|)    GSPO, arXiv 2507.18071"""

    def of_group(group: list[Episode]) -> Tensor:
        advantage = group_relative(group)
        stats = [
            pessimistic(ratio(theta, e).log().mean().exp(), a, 1 - 3e-4, 1 + 4e-4)
            for e, a in zip(group, advantage, strict=True)
        ]
        return torch.stack(stats).mean()

    return gradient_of_mean(theta, batch, of_group)


def reinforce_with(
    weight: Callable[[Tensor], Tensor], baseline: Callable[[list[Episode]], Tensor], *, by_length: bool
) -> Callable[[Tensor, Groups], Tensor]:
    """J = 1/G sum_i sg(weight(w_i)) (R_i - b_i) log pi(y_i) [/ |y_i|] with w_i the product of the token ratios."""

    def reference(theta: Tensor, batch: Groups) -> Tensor:
        def of_group(group: list[Episode]) -> Tensor:
            reward = rewards(group)
            stats = []
            for episode, advantage in zip(group, reward - baseline(group), strict=True):
                logprob = logprobs(theta, episode)
                scale = 1 / len(logprob) if by_length else 1.0
                stats.append(weight(ratio(theta, episode).prod().detach()) * advantage * logprob.sum() * scale)
            return torch.stack(stats).mean()

        return gradient_of_mean(theta, batch, of_group)

    return reference


def mean_of(group: list[Episode]) -> Tensor:
    return rewards(group).mean()


def others_mean(group: list[Episode]) -> Tensor:
    """b_i = 1/(k-1) sum_{j != i} R_j    RLOO, arXiv 2402.14740"""
    reward = rewards(group)
    return torch.stack([torch.cat([reward[:i], reward[i + 1 :]]).mean() for i in range(len(reward))])


def by_length(group: list[Episode]) -> Tensor:
    """b = sum l_i R_i / sum l_i    OPO, arXiv 2505.23585"""
    lengths = [len(episode.actions) for episode in group]
    return float64([sum(n * e.reward for n, e in zip(lengths, group, strict=True)) / sum(lengths)])


def cispo(theta: Tensor, batch: Groups) -> Tensor:
    """J = 1/sum|o_i| sum_i sum_t sg(clip(r, 0, 1 + eps)) A log pi    MiniMax-M1, arXiv 2506.13585"""

    def of_group(group: list[Episode]) -> Tensor:
        stats = [
            ratio(theta, e).detach().clamp(max=5.0) * a * logprobs(theta, e)
            for e, a in zip(group, group_relative(group), strict=True)
        ]
        return torch.cat(stats).mean()

    return gradient_of_mean(theta, batch, of_group)


def otb(theta: Tensor, batch: Groups) -> Tensor:
    """sum_t (R - b_t) grad log pi_t, b_t = sum_i W_it R_i / sum_i W_it, W_it = sum_j |e_a - pi|^2   arXiv 2602.07078"""

    def of_group(group: list[Episode]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        if rewards(group).std() == 0:
            return total * theta.sum()
        energies = []
        for episode in group:
            residual = torch.eye(4, dtype=torch.float64)[episode.actions] - theta.detach().softmax(-1)[episode.states]
            energies.append(residual.square().sum(-1).cumsum(0).tolist())
        second_longest = sorted(map(len, energies))[-2]
        for episode in group:
            logprob = logprobs(theta, episode)
            for t in range(len(logprob)):
                if t >= second_longest:  # only the longest has such tokens: no baseline in its tail
                    total = total + episode.reward * logprob[t]
                    continue
                alive = [(w[t], e.reward) for w, e in zip(energies, group, strict=True) if len(w) > t]
                baseline = sum(w * r for w, r in alive) / sum(w for w, _ in alive)
                total = total + (episode.reward - baseline) * logprob[t]
        return total / len(group)

    return gradient_of_mean(theta, batch, of_group)


def m2po(theta: Tensor, batch: Groups) -> Tensor:
    """PPO between exp(-tau) and exp(tau)    arXiv 2510.01161, as Infini-AI-Lab/M2PO computes it

    tau^2 is the largest (log r)^2, of the tokens with A > 0 and r > 1 or A < 0 and r < 1, at which the mean of theirs,
    capped at tau^2, is <= 0.04.
    """

    def is_bound(r: Tensor, advantage: Tensor) -> Tensor:
        return (r > 1) if advantage > 0 else (r < 1) & (advantage < 0)

    moments = []
    for group in batch:
        for episode, advantage in zip(group, group_relative(group), strict=True):
            r = ratio(theta, episode).detach()
            moments += r[is_bound(r, advantage)].log().square().tolist()
    caps = [cap for cap in moments if sum(min(moment, cap) for moment in moments) / len(moments) <= 0.04]
    tau = math.sqrt(max(caps)) + 1e-12 if caps else 0.0

    def of_group(group: list[Episode]) -> Tensor:
        stats = []
        for episode, advantage in zip(group, group_relative(group), strict=True):
            stats.append(pessimistic(ratio(theta, episode), advantage, math.exp(-tau), math.exp(tau)))
        return torch.cat(stats).mean()

    return gradient_of_mean(theta, batch, of_group)


def bapo(theta: Tensor, batch: Groups) -> Tensor:
    """Dual-clip PPO between bounds that move until P = sum_{A>0} min(r, high) A is half of its counterpart Q

    arXiv 2510.18927, with the numbers of WooooDyy/BAPO, recipe/bapo/run_bapo_example.sh
    """
    tokens = [
        (float(r), float(a))
        for group in batch
        for e, a in zip(group, group_relative(group), strict=True)
        for r in ratio(theta, e).detach()
    ]

    def half(low: float, high: float) -> bool:
        positive = sum(min(r, high) * a for r, a in tokens if a > 0)
        return positive >= 0.5 * sum(max(r, low) * -a for r, a in tokens if a < 0)

    low, high = 0.8, 1.2
    while not half(low, high) and low < 0.95:
        low = min(low + 0.05, 0.95)
    while not half(low, high) and high < 2.0:
        high = min(high + 0.1, 2.0)

    def dual(weight: Tensor, advantage: Tensor) -> Tensor:
        """max(3 A, min(w A, clip(w) A)) where A < 0"""
        stat = pessimistic(weight, advantage, low, high)
        return torch.maximum(stat, 3 * advantage.expand_as(stat)) if advantage < 0 else stat

    def of_group(group: list[Episode]) -> Tensor:
        advantage = group_relative(group)
        return torch.cat([dual(ratio(theta, e), a) for e, a in zip(group, advantage, strict=True)]).mean()

    return gradient_of_mean(theta, batch, of_group)


def vcpo_published(theta: Tensor, batch: Groups) -> Tensor:
    """g = 1/B sum wbar (R - b*) / s * 1/L grad, b* = sum w^2 N^2 R / sum w^2 N^2, N the norm of the *summed* score

    The settings of mit-han-lab/vcpo's scripts; s has n in its denominator there.
    """
    total = torch.zeros_like(theta)
    for group in batch:
        reward = rewards(group)
        if reward.std() == 0:
            continue
        weights = [float(ratio(theta, e).detach().prod()) for e in group]
        sums = [score(theta, logprobs(theta, e).sum()) for e in group]
        shares = float64([w**2 * float(s.square().sum()) for w, s in zip(weights, sums, strict=True)])
        baseline = (shares * reward).sum() / shares.sum()
        for weight, one, episode in zip(weights, sums, group, strict=True):
            advantage = (episode.reward - baseline) / reward.std(unbiased=False)
            total += min(weight, 8.0) * advantage * one / len(episode.actions)
    return total / sum(map(len, batch))


def vtrace(theta: Tensor, batch: Groups) -> Tensor:
    """rho_s (v_{s+1} - b) grad log pi_s with V = b, R at the end alone, bars at 1    IMPALA, arXiv 1802.01561

    v_s - V = sum_{t >= s} prod_{s <= i < t} c_i rho_t (r_t + V' - V), of which only t = T, R - b, is not 0.
    """

    def of_group(group: list[Episode]) -> Tensor:
        stats = []
        for episode, baseline in zip(group, others_mean(group).tolist(), strict=True):
            r = ratio(theta, episode).detach().clamp(max=1.0)
            target = [float(r[t:-1].prod() * r[-1]) * (episode.reward - baseline) for t in range(1, len(r))]
            advantage = float64([*target, episode.reward - baseline])
            stats.append((r * advantage * logprobs(theta, episode)).mean())
        return torch.stack(stats).mean()

    return gradient_of_mean(theta, batch, of_group)


def vcpo(theta: Tensor, batch: Groups, *, is_safe: bool = False) -> Tensor:
    """g = 1/B sum wbar (R - b*) grad, b* = sum w^2 n^2 R / sum w^2 n^2    VCPO, arXiv 2602.17616, sec. 4

    vcpo_safe has wbar in b* too, and never more than the mean.
    """
    total = torch.zeros_like(theta)
    for group in batch:
        if rewards(group).std() == 0:
            continue
        weights = [float(ratio(theta, e).detach().prod().clamp(max=8.0)) for e in group]
        scores = [score(theta, logprobs(theta, e).mean()) for e in group]
        whole = weights if is_safe else [float(ratio(theta, e).detach().prod()) for e in group]
        shares = [w**2 * float(s.square().sum()) for w, s in zip(whole, scores, strict=True)]
        baseline = sum(share * e.reward for share, e in zip(shares, group, strict=True)) / sum(shares)
        if is_safe:
            baseline = min(baseline, float(rewards(group).mean()))
        for weight, one, episode in zip(weights, scores, group, strict=True):
            total += weight * (episode.reward - baseline) * one
    return total / sum(map(len, batch))


def tba(theta: Tensor, batch: Groups) -> Tensor:
    """J = -beta / 2 mean_k (log Z + d_k - R_k / beta)^2, log Z = mean_k (R_k / beta - d_k)    TBA, arXiv 2503.18929"""
    beta = 0.012

    def of_group(group: list[Episode]) -> Tensor:
        d_K = torch.stack([(logprobs(theta, e) - e.reference).sum() for e in group])
        log_z = (rewards(group) / beta - d_K).mean()
        return -beta / 2 * (log_z + d_K - rewards(group) / beta).square().mean()

    return gradient_of_mean(theta, batch, of_group)


def distill(theta: Tensor, batch: Groups) -> Tensor:
    """J = -1/sum|o| sum_t min(r, 8) (log pi - log teacher)^2 / 2, r a constant: reverse KL on the student's tokens."""

    def of_group(group: list[Episode]) -> Tensor:
        losses = [
            ratio(theta, e).detach().clamp(max=8.0) * (logprobs(theta, e) - e.reference).square() / 2 for e in group
        ]
        return -torch.cat(losses).mean()

    return gradient_of_mean(theta, batch, of_group)


def imitate(theta: Tensor, batch: Groups) -> Tensor:
    """J = 1/B sum_i [R_i > 0] mean_t log pi    RAFT, arXiv 2304.06767, with failures in B"""

    def of_group(group: list[Episode]) -> Tensor:
        return torch.stack([logprobs(theta, e).mean() * (e.reward > 0) for e in group]).mean()

    return gradient_of_mean(theta, batch, of_group)


REFERENCES: References = {
    "vcpo": vcpo,
    "vcpo_published": vcpo_published,
    "vcpo_safe": lambda theta, batch: vcpo(theta, batch, is_safe=True),
    "grpo": grpo,
    "dapo": dapo,
    "gspo": gspo,
    "tis": reinforce_with(lambda w: w.clamp(max=8.0), mean_of, by_length=True),
    "mis": reinforce_with(lambda w: w * (w <= 8.0), mean_of, by_length=True),
    "cispo": cispo,
    "rloo": reinforce_with(torch.ones_like, others_mean, by_length=False),
    "opo": reinforce_with(torch.ones_like, by_length, by_length=False),
    "otb": otb,
    "m2po": m2po,
    "bapo": bapo,
    "vtrace": vtrace,
    "reinforce": reinforce_with(torch.ones_like, lambda group: torch.zeros(()), by_length=False),
    "tba": tba,
    "distill": distill,
    "imitate": imitate,
}


@pytest.mark.parametrize("off_policy", [0.0, 0.4, 1.5])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_gradient_of_its_papers_objective(preset: str, off_policy: float) -> None:
    theta = policy()
    batch = groups(theta, off_policy=off_policy)
    theirs = REFERENCES[preset](theta, batch).detach()
    ours = objective_gradient(theta, batch, AlgorithmConfig(preset=preset))
    assert theirs.norm() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("treatment", find("algorithm.treatment")[0].choices)
def test_every_treatment_of_the_config_but_none_cuts_a_large_weight(treatment: str) -> None:
    algorithm = AlgorithmConfig.model_validate({"ratio": "token", "treatment": treatment, "baseline": "mean"})
    member = Member(log_ratio_N=torch.tensor([4.0, 0.0]), advantage=0.5, reward=1.0, group=0)
    (weights,) = PolicyGradient(algorithm).batch_weights([member])
    assert (weights.num_clipped > 0) == (treatment != "none")


@pytest.mark.parametrize("baseline", find("algorithm.baseline")[0].choices)
def test_every_baseline_of_the_config_gives_the_better_member_the_larger_advantage(baseline: str) -> None:
    ratio = "sequence" if baseline in OPTIMAL else "token"
    algorithm = AlgorithmConfig.model_validate({"ratio": ratio, "treatment": "none", "baseline": baseline})
    if baseline == "otb":  # R - b_t is part of its weights
        assert PolicyGradient(algorithm).needs_logits
        return
    advantage_G = PolicyGradient(algorithm).advantages(
        Group(reward_E=torch.tensor([1.0, 0.0]), num_actions_E=torch.tensor([5, 7]))
    )
    assert advantage_G is not None and advantage_G[0] > advantage_G[1]
    assert PolicyGradient(algorithm).needs_norms == (baseline in OPTIMAL)
