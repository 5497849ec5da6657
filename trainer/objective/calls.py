"""Calls of an objective, with what it returns checked: wrong shapes are named, with the class and the fix.

Every pass asks objectives through these functions, `trial.py` also before the
first step. NaN and infinities pass: they refuse the step, and the log names the trajectory (`ScoredTrajectory.stats`).
Shapes: _E episodes of a group, _N action tokens of a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from trainer.objective.interface import Group, Member, MemberWeights, Objective


def advantages(objective: Objective, group: Group) -> list[Tensor] | None:
    """The advantage of each episode, a scalar; or of each of its action tokens, [N]. float64.

    Raises ConfigError where the objective returns another number of them.

    Example: `[tensor(0.5), tensor(-0.5)]` for a group with rewards 1 and 0 under `preset: tis`.
    """
    found = objective.advantages(group)
    if found is None:
        return None
    num_episodes = len(group.reward_E)
    if (isinstance(found, Tensor) and found.shape != (num_episodes,)) or len(found) != num_episodes:
        got = list(found.shape) if isinstance(found, Tensor) else f"a list of {len(found)}"
        raise wrong(objective, "advantages", f"{got}", f"[{num_episodes}], one for each episode of the group")
    each = [torch.as_tensor(one, dtype=torch.float64) for one in found]
    for one, num_actions in zip(each, group.num_actions_E.tolist(), strict=True):
        if one.ndim and one.shape != (num_actions,):
            expected = f"[{num_actions}], one for each action token of the episode"
            raise wrong(objective, "advantages", f"{list(one.shape)} for an episode", expected)
    return each


def weigh(objective: Objective, members: Sequence[Member]) -> list[MemberWeights]:
    """Weights and seeds of trajectories, further terms included: all of the step at once where `needs_batch`.

    Raises ConfigError where the objective returns tensors of the wrong shape or weights for another number of members.
    """
    if objective.needs_batch:
        found = objective.batch_weights(members)
        if len(found) != len(members):
            raise wrong(objective, "batch_weights", f"{len(found)} records", f"{len(members)}, one for each member")
    else:
        found = [objective.weights(member) for member in members]
    return [_complete(objective, member, one) for member, one in zip(members, found, strict=True)]


def _complete(objective: Objective, member: Member, found: MemberWeights) -> MemberWeights:
    """The same with the seeds of further terms."""
    if not isinstance(found, MemberWeights):
        raise wrong(objective, "weights", f"a {type(found).__name__}", "MemberWeights.of(member, weight_N)")
    terms = objective.terms(member)
    if terms is not None:
        found = replace(
            found,
            logprob_seed_N=_sum(found.logprob_seed_N, terms.logprob_seed_N),
            entropy_seed_N=_sum(found.entropy_seed_N, terms.entropy_seed_N),
        )
    expected = f"[{len(member.log_ratio_N)}], one for each action token"
    for name, tensor in tensors_of(found).items():
        if tensor.shape != member.log_ratio_N.shape:
            raise wrong(objective, "weights or terms", f"{name} of shape {list(tensor.shape)}", expected)
    return found


def tensors_of(found: MemberWeights) -> dict[str, Tensor]:
    """What it has one of for each action token, by name."""
    names = ("weight_N", "logprob_seed_N", "entropy_seed_N")
    return {name: tensor for name in names if (tensor := getattr(found, name)) is not None}


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other.double()
    return one + other.double()


def wrong(objective: Objective, method: str, got: str, expected: str) -> ConfigError:
    """The error for a method that returned `got` in place of `expected`."""
    name = type(objective).__name__
    return ConfigError(f"algorithm.objective: {name}.{method} returned {got}; it must return {expected}")
