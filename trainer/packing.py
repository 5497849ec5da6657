"""From episodes to tensors, and from a batch to each rank's share. Knows no model and no maths.

Shapes: _S tokens the model reads, _N action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.errors import LearnerError
from agentrl.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTensors:
    """One trajectory as the model reads it. What follows the last action is left out: it changes nothing."""

    input_ids_S: Tensor  # int64
    predictor_N: Tensor  # int64, position in input_ids_S whose next token is the action
    target_N: Tensor  # int64, the action
    behavior_logprob_N: Tensor  # float64, natural log
    policy_version_N: Tensor  # int64


def action_tensors(trajectory: Trajectory, device: torch.device) -> ActionTensors:
    """Tensors of one trajectory. Raises LearnerError when its first token is an action: nothing predicts that one."""
    ids = trajectory.token_ids()
    action_mask_T = torch.tensor(trajectory.action_mask(), dtype=torch.bool)
    position_N = action_mask_T.nonzero()[:, 0]
    if len(position_N) and position_N[0] == 0:
        raise LearnerError(f"trajectory {trajectory.id} starts with an action token: it has no prompt")
    num_read = int(position_N[-1]) if len(position_N) else 0
    ids_T = torch.tensor(ids, dtype=torch.int64)
    behavior_T = torch.tensor(trajectory.behavior_logprobs(), dtype=torch.float64)
    version_T = torch.tensor(trajectory.policy_versions(), dtype=torch.int64)
    return ActionTensors(
        input_ids_S=ids_T[:num_read].to(device),
        predictor_N=(position_N - 1).to(device),
        target_N=ids_T[position_N].to(device),
        behavior_logprob_N=behavior_T[position_N].to(device),
        policy_version_N=version_T[position_N].to(device),
    )


def num_tokens(group: TrajectoryGroup) -> int:
    """All tokens of a group, observations included."""
    return sum(len(trajectory.token_ids()) for trajectory in group.trajectories)


def share_of_rank(groups: Sequence[TrajectoryGroup], *, rank: int, num_ranks: int) -> list[TrajectoryGroup]:
    """Whole groups for one rank, balanced by tokens: the largest first, each to the rank with the fewest so far.

    A group stays on one rank because its baseline needs all its members. Every rank computes the same split.
    """
    shares: list[list[TrajectoryGroup]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for group in sorted(groups, key=lambda group: (-num_tokens(group), group.group_id)):
        lightest = loads.index(min(loads))
        shares[lightest].append(group)
        loads[lightest] += num_tokens(group)
    return shares[rank]
