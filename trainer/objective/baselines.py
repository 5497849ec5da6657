"""Baselines, which are subtracted from rewards, as functions of rewards, lengths and scores. Pure; float64.

Independent of importance ratios: weights come as plain numbers. VCPO's own baseline is in vcpo.py.
Shapes: _G members of one group, _N action tokens of one trajectory, _T the longest trajectory of the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.config.presets import StdNorm


def mean(reward_G: Tensor) -> Tensor:
    """The group's mean reward, for every member. [G]

    >>> mean(torch.tensor([1.0, 0.0])).tolist()
    [0.5, 0.5]
    """
    return reward_G.mean().expand_as(reward_G)


def leave_one_out(reward_G: Tensor) -> Tensor:
    """Mean reward of the *other* members (RLOO, arXiv 2402.14740). [G] Raises ValueError for a single member.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.5])).tolist()
    [0.25, 0.75, 0.5]
    """
    if len(reward_G) < 2:
        raise ValueError("leave-one-out needs at least two members")
    return (reward_G.sum() - reward_G) / (len(reward_G) - 1)


def length_weighted(reward_G: Tensor, num_actions_G: Tensor) -> Tensor:
    """sum l R / sum l (OPO, arXiv 2505.23585): optimal if squared score norms are proportional to the length l. [G]

    A group without action tokens gets the mean.

    >>> length_weighted(torch.tensor([1.0, 0.0]), torch.tensor([3, 1])).tolist()
    [0.75, 0.75]
    """
    length_G = num_actions_G.double()
    if not bool((length_G > 0).any()):
        return mean(reward_G)
    return ((length_G * reward_G).sum() / length_G.sum()).expand_as(reward_G)


def reward_std(reward_G: Tensor, kind: StdNorm = True) -> Tensor:
    """Standard deviation with n - 1 in the denominator, as in GRPO (arXiv 2402.03300), or n (`population`). Scalar.

    Defined for groups with spread only.

    >>> reward = torch.tensor([1.0, 0.0, 0.0, 1.0])
    >>> round(float(reward_std(reward)), 3), float(reward_std(reward, "population"))
    (0.577, 0.5)
    """
    return reward_G.std(unbiased=kind != "population")


def logit_norm2(logprob_N: Tensor, sum_pi2_N: Tensor) -> Tensor:
    """Squared norm of d log pi_t / d logits = e_a - pi:  1 - 2 pi_t(a) + sum_v pi_t(v)^2. [N]

    OTB (arXiv 2602.07078) uses it in place of a token's score norm: it needs no backward. Never negative.
    """
    return (1 - 2 * logprob_N.double().exp() + sum_pi2_N.double()).clamp(min=0)


def optimal_token(reward_G: Tensor, weights_G: Sequence[Tensor], logit_norm2_G: Sequence[Tensor]) -> list[Tensor]:
    """The optimal token baseline of each member's tokens (OTB, arXiv 2602.07078): one tensor [N] per member.

        b_t = sum_i W_it R_i / sum_i W_it        W_it = sum_{j <= t} w_ij^2 e_ij

    with e the squared logit-gradient norm and w the weight that the estimator uses. A member that has ended by token t
    has no part in b_t. Where one member is longer than all others, b_t = 0 in its tail: its own reward would be the
    baseline there, and the tail would have no gradient. The authors' code in verl has the same (`handle_zero_tail`).
    Where no W is positive there is no gradient whose variance could be reduced: b_t is the mean.

    Args:
        weights_G: weight of each action token, one tensor [N] per member.
        logit_norm2_G: e of each action token, one tensor [N] per member.
    """
    *_, second, longest = sorted([0, *map(len, weights_G)])
    energy_GT = reward_G.new_zeros(len(reward_G), longest, dtype=torch.float64)
    for energy_T, weight_N, norm2_N in zip(energy_GT, weights_G, logit_norm2_G, strict=True):
        energy_T[: len(weight_N)] = (weight_N.square() * norm2_N).cumsum(0)
    total_T = energy_GT.sum(0)
    weighted_T = (energy_GT * reward_G[:, None]).sum(0) / total_T.masked_fill(total_T == 0, 1.0)
    baseline_T = torch.where(total_T == 0, reward_G.mean(), weighted_T)
    if len(weights_G) > 1:
        baseline_T[second:] = 0.0  # empty unless one member is the longest
    return [baseline_T[: len(weight_N)] for weight_N in weights_G]
