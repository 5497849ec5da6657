"""From trajectories to packs: micro-batches under a token budget in which trajectories follow one another.

Independent of models and objectives.
Shapes: _S tokens of a pack that the model reads, _N its action tokens, _n its segments (one per trajectory).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from agentrl.errors import LearnerError
from agentrl.types import Batch, Completion, FinishReason, Trajectory, TrajectoryGroup, Turn, VersionSpan

_NOTHING = Completion(token_ids=(), behavior_logprobs=(), version_spans=(), finish_reason=FinishReason.ABORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTensors:
    """One trajectory as model input. Tokens after the last action are left out: they change nothing.

    `action_tensors` makes it from a `Trajectory`.
    """

    input_ids_S: Tensor  # int64
    predictor_N: Tensor  # int64, position in input_ids_S whose next token is the action
    target_N: Tensor  # int64, the action
    behavior_logprob_N: Tensor  # float64, natural log; on the CPU, where weights are computed
    policy_version_N: Tensor  # int64, on the CPU

    @property
    def num_read(self) -> int:
        """Number of input tokens."""
        return len(self.input_ids_S)

    @property
    def num_actions(self) -> int:
        """Number of action tokens."""
        return len(self.target_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Trajectories one after the other, as one input without padding; `join` makes it.

    No token may attend to another segment.
    """

    input_ids_S: Tensor  # int64
    position_ids_S: Tensor  # int64, from 0 in every segment
    bounds: tuple[int, ...]  # [n + 1] segment i reads [bounds[i], bounds[i + 1])
    predictor_N: Tensor  # int64, position in input_ids_S whose next token is the action
    target_N: Tensor  # int64, the action
    action_bounds: tuple[int, ...]  # [n + 1] segment i acts in [action_bounds[i], action_bounds[i + 1])

    @property
    def num_segments(self) -> int:
        """Number of trajectories in the pack."""
        return len(self.bounds) - 1

    def per_segment(self, values_N: Tensor) -> tuple[Tensor, ...]:
        """Split a tensor over the pack's action tokens into one part per segment."""
        lengths = [end - start for start, end in pairwise(self.action_bounds)]
        return torch.split(values_N, lengths)


def without_older_tokens(batch: Batch) -> Batch:
    """The batch as if weights before its version had sampled nothing: their tokens are read like observations.

    So they are in no importance ratio, no length and no gradient (`rollout.partial: mask`; the mask_offpolicy option of
    slime's partial rollouts, APRIL, arXiv 2509.18521).
    """
    return replace(batch, groups=tuple(_group_since(batch.policy_version, group) for group in batch.groups))


def _group_since(version: int, group: TrajectoryGroup) -> TrajectoryGroup:
    episodes = (
        replace(episode, segments=tuple(_trajectory_since(version, one) for one in episode.segments))
        for episode in group.episodes
    )
    return replace(group, episodes=tuple(episodes))


def _trajectory_since(version: int, trajectory: Trajectory) -> Trajectory:
    if not trajectory.num_action_tokens or trajectory.policy_version >= version:
        return trajectory
    turns: list[Turn] = []
    read: list[int] = []
    for turn in trajectory.turns:
        read += turn.observation_ids
        for span in turn.completion.version_spans:
            if span.version < version:
                read += turn.completion.token_ids[span.start : span.end]
            else:
                turns.append(Turn(observation_ids=tuple(read), completion=_part(turn.completion, span)))
                read = []
    if read:  # what ends the trajectory: nothing was sampled after it
        turns.append(Turn(observation_ids=tuple(read), completion=_NOTHING))
    return replace(trajectory, turns=tuple(turns))


def _part(completion: Completion, span: VersionSpan) -> Completion:
    return Completion(
        token_ids=completion.token_ids[span.start : span.end],
        behavior_logprobs=completion.behavior_logprobs[span.start : span.end],
        version_spans=(VersionSpan(version=span.version, start=0, end=span.end - span.start),),
        finish_reason=completion.finish_reason,
    )


def action_tensors(trajectory: Trajectory, device: torch.device) -> ActionTensors:
    """Tensors of one trajectory. Raises LearnerError if its first token is an action: no position predicts it."""
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
        behavior_logprob_N=behavior_T[position_N],
        policy_version_N=version_T[position_N],
    )


def all_actions(ids_T: Tensor) -> ActionTensors:
    """A text of at least two tokens, all of which are actions but the first."""
    num_actions = len(ids_T) - 1
    return ActionTensors(
        input_ids_S=ids_T[:-1],
        predictor_N=torch.arange(num_actions, device=ids_T.device),
        target_N=ids_T[1:],
        behavior_logprob_N=torch.zeros(num_actions, dtype=torch.float64),
        policy_version_N=torch.zeros(num_actions, dtype=torch.int64),
    )


def shortest(device: torch.device) -> ActionTensors:
    """A text that reads two tokens, for a pass whose result nobody needs: other ranks wait for it."""
    return all_actions(torch.zeros(3, dtype=torch.int64, device=device))


def join(members: Sequence[ActionTensors]) -> Pack:
    """Put trajectories into one pack, in this order. Each must have at least one action token."""
    bounds = (0, *accumulate(member.num_read for member in members))
    device = members[0].input_ids_S.device
    return Pack(
        input_ids_S=torch.cat([member.input_ids_S for member in members]),
        position_ids_S=torch.cat([torch.arange(member.num_read, device=device) for member in members]),
        bounds=bounds,
        predictor_N=torch.cat([member.predictor_N + start for member, start in zip(members, bounds[:-1], strict=True)]),
        target_N=torch.cat([member.target_N for member in members]),
        action_bounds=(0, *accumulate(member.num_actions for member in members)),
    )


def plan(num_read: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Which trajectories share a pack: as few packs as first-fit-decreasing finds, then balanced.

    `num_read[i]` is the number of input tokens of trajectory i. Returns lists of indices; each index occurs once. No
    pack exceeds the budget, except a pack of one trajectory that is longer by itself. The plan depends on the lengths
    only.

    >>> plan([60, 60, 30, 30, 10, 10], budget_tokens=140)
    [[0, 2, 4], [1, 3, 5]]
    """
    order = sorted(range(len(num_read)), key=lambda index: (-num_read[index], index))
    packs = _first_fit(order, num_read, budget_tokens)
    balanced = _balanced(order, num_read, len(packs))
    is_within = all(len(pack) == 1 or sum(num_read[i] for i in pack) <= budget_tokens for pack in balanced)
    return [sorted(pack) for pack in (balanced if is_within else packs)]


def _first_fit(order: Sequence[int], num_read: Sequence[int], budget_tokens: int) -> list[list[int]]:
    packs: list[list[int]] = []
    loads: list[int] = []
    for index in order:
        room = (at for at, load in enumerate(loads) if load + num_read[index] <= budget_tokens)
        at = next(room, len(packs))
        if at == len(packs):
            packs.append([])
            loads.append(0)
        packs[at].append(index)
        loads[at] += num_read[index]
    return packs


def _balanced(
    order: Sequence[int], num_read: Sequence[int], num_packs: int, loads: list[int] | None = None
) -> list[list[int]]:
    """In decreasing order of length, each to the pack with the fewest tokens so far. `loads`: from the beginning."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    loads = [0] * num_packs if loads is None else loads
    for index in order:
        lightest = loads.index(min(loads))
        packs[lightest].append(index)
        loads[lightest] += num_read[index]
    return packs


def spread(num_read: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Which rank computes which trajectories, balanced by tokens: indices of `num_read`, one list for each rank.

    >>> spread([10, 60, 30, 30], num_ranks=2)
    [[0, 1], [2, 3]]
    """
    order = sorted(range(len(num_read)), key=lambda index: (-num_read[index], index))
    return [sorted(share) for share in _balanced(order, num_read, num_ranks)]


def num_tokens(group: TrajectoryGroup) -> int:
    """Number of tokens of a group, observations included."""
    return sum(len(trajectory.token_ids()) for trajectory in group.trajectories)


def share_of_rank(
    groups: Sequence[TrajectoryGroup], *, rank: int, num_ranks: int, loads: list[int] | None = None
) -> list[TrajectoryGroup]:
    """The groups of one rank, balanced by tokens: in decreasing size, each to the rank with the fewest tokens so far.

    A group stays on one rank because its baseline needs all its members. Every rank computes the same split. `loads`:
    tokens that each rank has so far, of groups that were dealt out before; these groups' are added to it.
    """
    order = sorted(groups, key=lambda group: (-num_tokens(group), group.group_id))
    shares = _balanced(range(len(order)), [num_tokens(group) for group in order], num_ranks, loads)
    return [order[index] for index in shares[rank]]
