"""Credit by turn: each turn's tokens are trained on the rewards that came with it and after it. Pure.

    g = 1/B sum_i 1/L_i sum_k (sum_{j >= k} w_ij r_ij - w_ik b_ik) grad log pi(a_ik)

a_ik is turn k of episode i, r_ij the reward of turn j, w_ij the importance ratio of all action tokens up to the end of
turn j (per-decision importance sampling: Precup, Sutton and Singh, ICML 2000), and b_ik a baseline. Rewards of `score`
come with the last turn. What came before turn k, rewards included, is a constant for the gradient of its tokens; so is
b_ik if nothing in it comes from turn k of this episode or from later. Ours is the mean, over the *other* episodes, of
what they still earned from turn k on. docs/turn-credit.md derives this and measures it. Independent of models.
Shapes: _K turns of an episode or of a segment, _N their action tokens, _E episodes of a group. float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agentrl.types import Trajectory
from trainer.objective import ratios
from trainer.objective.interface import Group, Member, MemberWeights, Turns
from trainer.objective.policy_gradient import PolicyGradient


class TurnCredit(PolicyGradient):
    """The policy gradient of rewards to go, with a baseline for each turn (`algorithm.credit: turn`).

    Example: `make_objective(AlgorithmConfig(preset="rloo", credit="turn"))`.
    """

    needs_turns = True

    def advantages(self, group: Group) -> list[Tensor]:
        """The reward to go of each action token's turn minus its baseline, one [N] for each episode.

        Raises ValueError for a group without its episodes, whose turns are needed.
        """
        if len(group.episodes) != len(group.reward_E):
            raise ValueError("algorithm.credit=turn needs Group.episodes: rewards alone say nothing of turns")
        turns = [turns_of(segments) for segments in group.episodes]
        value = to_go = [torch.cat([rewards_to_go(one.reward_K) for one in segments]) for segments in turns]
        if self.algorithm.baseline == "leave_one_out":
            value = [to_go_K - b_K for to_go_K, b_K in zip(to_go, self.baselines(to_go), strict=True)]
        num_actions = [torch.cat([one.num_actions_K for one in segments]) for segments in turns]
        return [value_K.repeat_interleave(sizes_K) for value_K, sizes_K in zip(value, num_actions, strict=True)]

    def baselines(self, to_go: Sequence[Tensor]) -> list[Tensor]:
        """The baseline of each turn of each episode of a group, from their rewards to go. One [K] an episode."""
        return leave_one_out_by_turn(to_go)

    def weights(self, member: Member) -> MemberWeights:
        """The treated ratio up to the end of each token's turn; as seeds, what later ratios change of later rewards.

        Raises ValueError without the member's turns.
        """
        found = super().weights(member)
        if self.algorithm.ratio == "none" or not len(member.log_ratio_N):
            return found
        if member.turns is None:
            raise ValueError("algorithm.credit=turn needs Member.turns")
        num_actions_K = member.turns.num_actions_K
        log_weight_K = up_to_turn(member.log_ratio_N.double(), num_actions_K)
        log_used_K = self._treated(member, log_weight_K)
        weight_K = ratios.exp(log_used_K)
        return replace(
            found,
            weight_N=weight_K.repeat_interleave(num_actions_K),
            log_used=float(log_used_K.logsumexp(0) - math.log(len(log_used_K))),
            num_clipped=int((log_used_K != log_weight_K).sum()),
            num_weights=len(log_used_K),
            logprob_seed_N=later_ratios(weight_K, member.turns.reward_K).repeat_interleave(num_actions_K),
        )


def turns_of(segments: Sequence[Trajectory]) -> list[Turns]:
    """The turns of each segment of one episode.

    The last turn of the episode has what is no turn's own: `score`, the rewards of the group, penalties. So the rewards
    of an episode's turns add up to its reward.
    """
    left, found = segments[0].reward, []
    for segment in segments:
        own = [turn.reward for turn in segment.turns]
        reward_K = torch.tensor([*own[:-1], left - sum(own[:-1])][: len(own)], dtype=torch.float64)
        sizes = [len(turn.completion.token_ids) for turn in segment.turns]
        found.append(Turns(num_actions_K=torch.tensor(sizes, dtype=torch.int64), reward_K=reward_K))
        left -= sum(own)
    return found


def rewards_to_go(reward_K: Tensor) -> Tensor:
    """What is still earned at each turn, that turn included. [K]

    >>> rewards_to_go(torch.tensor([0.5, 0.0, 1.5])).tolist()
    [2.0, 1.5, 1.5]
    """
    return reward_K.flip(0).cumsum(0).flip(0)


def leave_one_out_by_turn(to_go: Sequence[Tensor]) -> list[Tensor]:
    """The mean reward to go of the *other* episodes at each turn of each. One [K] an episode.

    Another that has ended by then counts with its last turn, so that without rewards of turns the baseline is that of
    whole episodes. No other episode depends on this one's actions, so E[b grad log pi] is 0 whatever decides how long
    episodes are. The mean over all that reached the turn, this episode included, has no such property
    (docs/turn-credit.md).

    Raises ValueError for a single episode.

    >>> [b.tolist() for b in leave_one_out_by_turn([torch.tensor([3.0, 1.0]), torch.tensor([2.0])])]
    [[2.0, 2.0], [3.0]]
    """
    if len(to_go) < 2:
        raise ValueError("leave-one-out needs at least two episodes")
    return [_by_turn([*to_go[:index], *to_go[index + 1 :]], len(own_K)) for index, own_K in enumerate(to_go)]


def _by_turn(others: Sequence[Tensor], num_turns: int) -> Tensor:
    """The mean of the others that have a turn, at each of the first `num_turns` turns. [num_turns]"""
    acted = [one.tolist() for one in others if len(one)]
    means = (sum(one[min(turn, len(one) - 1)] for one in acted) / max(1, len(acted)) for turn in range(num_turns))
    return torch.tensor(list(means), dtype=torch.float64)


def up_to_turn(log_ratio_N: Tensor, num_actions_K: Tensor) -> Tensor:
    """Log of the ratio of all action tokens up to the end of each turn. [K]

    >>> up_to_turn(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 1])).tolist()
    [3.0, 3.0, 7.0]
    """
    return torch.cat([log_ratio_N.new_zeros(1), log_ratio_N.cumsum(0)])[num_actions_K.cumsum(0)]


def later_ratios(weight_K: Tensor, reward_K: Tensor) -> Tensor:
    """sum_{j > k} (w_j - w_k) r_j: what the ratios of later turns change of the rewards to go from turn k. [K]

    >>> later_ratios(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([9.0, 1.0, 10.0])).tolist()  # (2-1) 1 + (4-1) 10, ...
    [31.0, 20.0, 0.0]
    """
    return _after(weight_K * reward_K) - weight_K * _after(reward_K)


def _after(value_K: Tensor) -> Tensor:
    """The sum of the values of the turns after each. [K]"""
    return rewards_to_go(value_K) - value_K
