"""An objective as a number that autograd can differentiate: for tests of a rule, without a model.

Its gradient is the one that a step makes. Independent of packs and of how score norms are measured.
Shapes: _N action tokens of a trajectory, _V vocabulary, _E episodes of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objective import baselines, calls
from trainer.objective.interface import Group, Member, Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One episode: what the policy gives each action token, with its graph.

    Example: `Sample(logits_NV=theta[state_N], token_N=action_N, behavior_logprob_N=mu_N, reward=1.0)`.
    """

    logits_NV: Tensor  # of the distributions that the tokens are sampled from
    token_N: Tensor  # int64
    behavior_logprob_N: Tensor  # log mu
    reward: float
    reference_logprob_N: Tensor | None = None


def surrogate(objective: Objective, groups: Sequence[Sequence[Sample]], *, step: int = 0) -> Tensor:
    """J = 1/B sum_i 1/L_i sum_t (A w + e) log pi_t + h H_t, with A, w, e and h constant. A scalar.

    Raises ValueError for an objective that needs score norms, and ConfigError for what `calls` refuses.

    >>> from agentrl.config.algorithm import AlgorithmConfig
    >>> from trainer.objective.registry import make_objective
    >>> logits = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    >>> mu = torch.full((2,), 0.25).log()
    >>> won, lost = (Sample(logits_NV=logits, token_N=torch.tensor([t, t]), behavior_logprob_N=mu, reward=float(t))
    ...     for t in (1, 0))
    >>> surrogate(make_objective(AlgorithmConfig(preset="grpo")), [[won, lost]]).backward()
    >>> [round(g, 3) for g in logits.grad[0].tolist()]  # A = +-1 / sqrt(2), of two episodes of two tokens
    [-0.177, 0.177, 0.0, 0.0]
    """
    if objective.needs_norms:
        raise ValueError(f"{type(objective).__name__} needs score norms: test it on a model, with Estimator")
    members: list[Member] = []
    scores: list[tuple[Tensor, Tensor, float]] = []  # log pi and entropy of each token, with their graph, and L
    num_episodes, total = sum(map(len, groups)), torch.zeros(())
    for number, samples in enumerate(groups):
        reward_E = torch.tensor([one.reward for one in samples], dtype=torch.float64)
        num_actions_E = torch.tensor([len(one.token_N) for one in samples])
        group = Group(reward_E=reward_E, num_actions_E=num_actions_E, step=step)
        advantages = calls.advantages(objective, group)
        lengths = objective.lengths(num_actions_E).tolist()
        for episode, (one, length) in enumerate(zip(samples, lengths, strict=True)):
            log_pi_NV = one.logits_NV.log_softmax(-1)
            logprob_N = log_pi_NV.gather(1, one.token_N[:, None])[:, 0]
            entropy_N = -(log_pi_NV.exp() * log_pi_NV).sum(-1)
            advantage = torch.zeros(()) if advantages is None else advantages[episode]
            members.append(_member(one, logprob_N, entropy_N, advantage, number, episode, step))
            scores.append((logprob_N, entropy_N, 0.0 if advantages is None else 1 / length / num_episodes))
    for member, weights, (logprob_N, entropy_N, share) in zip(
        members, calls.weigh(objective, members), scores, strict=True
    ):
        seed_N = weights.weight_N * member.token_advantage_N
        if weights.logprob_seed_N is not None:
            seed_N = seed_N + weights.logprob_seed_N
        total = total + share * (seed_N * logprob_N).sum()
        if weights.entropy_seed_N is not None:
            total = total + share * (weights.entropy_seed_N * entropy_N).sum()
    return total


def _member(
    one: Sample, logprob_N: Tensor, entropy_N: Tensor, advantage: Tensor, group: int, episode: int, step: int
) -> Member:
    logprob_N = logprob_N.detach().double()
    return Member(
        log_ratio_N=logprob_N - one.behavior_logprob_N.double(),
        advantage=float(advantage.mean()) if advantage.numel() else 0.0,
        reward=one.reward,
        group=group,
        episode=episode,
        advantage_N=advantage if advantage.ndim else None,
        logprob_N=logprob_N,
        entropy_N=entropy_N.detach().double(),
        logit_norm2_N=baselines.logit_norm2(logprob_N, one.logits_NV.detach().softmax(-1).square().sum(-1)),
        reference_logprob_N=one.reference_logprob_N,
        step=step,
    )
