"""Spurious tokens and their silence: STAPO (arXiv 2602.15620). Pure.

A token of a rewarded episode that was unlikely although the policy was sure gets the episode's whole advantage, and its
score is the largest of all. Such tokens are left out, and the loss is divided by the number of those that stay.
Independent of ratios and treatments, whose weights it is given. Shapes: _N action tokens of one trajectory, _M of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from trainer.objective import ratios
from trainer.objective.interface import Member, MemberWeights, by_group


def silenced(
    members: Sequence[Member], found: Sequence[MemberWeights], algorithm: AlgorithmConfig
) -> list[MemberWeights]:
    """The weights with zeros at spurious tokens, the others scaled so that L counts those that stay.

        g = 1/B sum_i A_i / L'_i sum_t M_it w_it grad log pi,    M_it = 0 where the token is spurious, else 1

    With `normalize_by_length: true` L' is the trajectory's own count, with `group` that of its group's members; where
    nothing stays it is 1. Unchanged where `algorithm.spurious` is not set. Raises ValueError for members without
    log-probabilities or entropies.

    Args:
        members: all of the step where `AlgorithmConfig.looks_at_batch` is true, else one trajectory.
    """
    if algorithm.spurious is None:
        return list(found)
    keeps = _keeps(members, algorithm)
    scales = [1.0] * len(members)
    if algorithm.normalize_by_length:
        parts = by_group(members) if algorithm.normalize_by_length == "group" else [[i] for i in range(len(members))]
        for part in parts:
            scale = sum(len(keeps[i]) for i in part) / max(1, sum(int(keeps[i].sum()) for i in part))
            for i in part:
                scales[i] = scale
    return [
        replace(one, weight_N=(one.weight_N * scale).masked_fill(~keep_N, 0.0), num_silenced=int((~keep_N).sum()))
        for one, keep_N, scale in zip(found, keeps, scales, strict=True)
    ]


def _keeps(members: Sequence[Member], algorithm: AlgorithmConfig) -> list[Tensor]:
    """M of each trajectory. bool [N]"""
    assert algorithm.spurious is not None
    entropies = [_given(member.entropy_N) for member in members]
    bound = algorithm.spurious.entropy
    if bound is None:
        bound = quantile(torch.cat(entropies), algorithm.spurious.entropy_quantile or 0.0)
    return [
        ~ratios.is_spurious(
            _given(member.logprob_N),
            entropy_N,
            member.token_advantage_N,
            probability=algorithm.spurious.probability,
            entropy=bound,
        )
        for member, entropy_N in zip(members, entropies, strict=True)
    ]


def quantile(values_M: Tensor, share: float) -> float:
    """The value below which at most `share` of all lie; -infinity without any.

    >>> quantile(torch.tensor([3.0, 1.0, 2.0, 4.0]), 0.5)  # below it are 1 and 2
    3.0
    """
    if not len(values_M):
        return -float("inf")
    return float(values_M.sort().values[int(share * len(values_M))])


def _given(value_N: Tensor | None) -> Tensor:
    if value_N is None:
        raise ValueError("spurious tokens need Member.logprob_N and Member.entropy_N")
    return value_N.double()
