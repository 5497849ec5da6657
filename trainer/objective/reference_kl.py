"""Keeping the policy near a frozen model: penalties in the reward or in the loss, and their coefficient. Pure.

With pi the policy, ref the frozen model and r_t = log ref(a_t) - log pi(a_t), all of them at sampled tokens:

| kind | the objective gets | its gradient's seed of grad log pi(a_t) |
|---|---|---|
| reward | R - beta d in the place of R, d = -sum_t r_t over the episode's tokens | as for any reward |
| k2 | -beta r_t^2 / 2 for each token | beta r_t: on-policy, the gradient of KL(pi, ref) at each state |
| k3 | -beta (e^{r_t} - r_t - 1) for each token | beta (e^{r_t} - 1): on-policy, that of KL(ref, pi) at each state |

`reward` with baseline mean and no ratio is TBA (arXiv 2503.18929), k3 is GRPO's term (arXiv 2402.03300, eq. 4). The
estimators are Schulman's (joschu.net/blog/kl-approx.html). k2 and k3 are not weighted by importance ratios, as in the
published algorithms. Independent of models.
Shapes: _N action tokens of one trajectory, _E episodes of a group. float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from trainer.objective import ratios
from trainer.objective.interface import Member, by_group


def coefficient(algorithm: AlgorithmConfig, step: int) -> float:
    """beta in the step after `step` steps: from kl_beta to kl_beta_end in equal steps, and that from then on.

    >>> annealed = AlgorithmConfig(preset="tba")  # 0.012 to 0.004 over 500 steps
    >>> [round(coefficient(annealed, step), 3) for step in (0, 250, 500, 900)]
    [0.012, 0.008, 0.004, 0.004]
    """
    if algorithm.kl_beta_end is None:
        return algorithm.kl_beta
    share = min(1.0, step / algorithm.kl_beta_steps)
    return algorithm.kl_beta + (algorithm.kl_beta_end - algorithm.kl_beta) * share


def log_ratio_N(member: Member) -> Tensor:
    """r, log ref - log pi of each token. [N] Raises ValueError without the frozen model's scores."""
    if member.reference_logprob_N is None or member.logprob_N is None:
        raise ValueError("the penalty needs Member.logprob_N and Member.reference_logprob_N")
    return member.reference_logprob_N.double() - member.logprob_N.double()


def k2_seed(r_N: Tensor) -> Tensor:
    """d(-r^2 / 2) / d log pi = r. [N]"""
    return r_N.double()


def k3_seed(r_N: Tensor) -> Tensor:
    """d(-(e^r - r - 1)) / d log pi = e^r - 1; infinite beyond r = 80. [N]

    >>> [round(x, 3) for x in k3_seed(torch.tensor([0.0, 1.0, -50.0])).tolist()]
    [0.0, 1.718, -1.0]
    """
    return ratios.exp(r_N.double()) - 1


def with_penalty(members: Sequence[Member], beta: float, centered: Callable[[Tensor, Tensor], Tensor]) -> list[Member]:
    """The members with the advantages of R - beta d in the place of those of R.

    Groups must be complete, except for episodes without action tokens, whose d is 0. `centered(value_E, num_actions_E)`
    subtracts the baseline, which must be linear in its first argument: A(R - beta d) = A(R) - beta A(d).
    """
    changed = list(members)
    for index_G in by_group(members):
        episodes = sorted({members[i].episode for i in index_G})
        num_episodes = max(len(episodes), members[index_G[0]].num_episodes)
        d_E = torch.zeros(num_episodes, dtype=torch.float64)
        num_actions_E = torch.zeros(num_episodes, dtype=torch.int64)
        for i in index_G:
            position = episodes.index(members[i].episode)
            d_E[position] -= log_ratio_N(members[i]).sum()
            num_actions_E[position] += len(members[i].log_ratio_N)
        penalty_E = beta * centered(d_E, num_actions_E)
        for i in index_G:
            one, penalty = members[i], float(penalty_E[episodes.index(members[i].episode)])
            advantage_N = None if one.advantage_N is None else one.advantage_N - penalty
            changed[i] = replace(one, advantage=one.advantage - penalty, advantage_N=advantage_N)
    return changed
