"""The two sums of exact norms, each rank with its part of them: 8 bytes a trained parameter over the ranks.

The pieces of one weight are added up on each rank, as long as one module's backward runs, and then summed over ranks
into the parts. So the open group must be the same on all ranks, and every rank must make the same passes. Independent
of how pieces are made and of which rank has which trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.gradient.sums import GradientSums
from trainer.ranks import whole_shape

SMALL = 2**16
"""Elements below which a parameter's sums stay whole on every rank: a collective would cost more than it saves."""


class ShardedSums(GradientSums):
    """`GradientSums` of which each rank holds one part. Parts are vectors of equal size; the last one is padded.

    `take` returns the parameter's whole shape with this rank's part of the sum over ranks in its place and zeros
    elsewhere, so that adding up over ranks, which DeepSpeed does, leaves the sum. A small parameter has this rank's
    own sum, as in `GradientSums`, which comes to the same.

    Args:
        small: see `SMALL`.
        scatter: takes a vector of `num_ranks` equal parts from every rank; returns this rank's part of their sum.

    >>> sums = ShardedSums([torch.zeros(3, 2)], rank=0, num_ranks=2, scatter=lambda whole: whole[:3], small=0)
    >>> sums.reset()
    >>> sums.add(0, torch.ones(3, 2), coefficient=2.0, score=1.0)
    >>> sums.finish(0)
    >>> sums.close_group(shift=0.5)
    >>> sums.take(0)
    tensor([[1.5000, 1.5000],
            [1.5000, 0.0000],
            [0.0000, 0.0000]])
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        rank: int,
        num_ranks: int,
        scatter: Callable[[Tensor], Tensor],
        small: int | None = None,
    ) -> None:
        super().__init__(parameters, has_scores=True)
        self._rank, self._num_ranks, self._scatter = rank, num_ranks, scatter
        limit = SMALL if small is None else small
        self._is_small = [whole_shape(parameter).numel() < limit for parameter in parameters]
        self._open: dict[int, tuple[Tensor, Tensor]] = {}

    def reset(self) -> None:
        """Start a step with zeros."""
        super().reset()
        self._open = {}

    def add(self, index: int, piece: Tensor, *, coefficient: float, score: float) -> None:
        """The same as in `GradientSums`, until `finish` on this rank only."""
        if self._is_small[index]:
            return super().add(index, piece, coefficient=coefficient, score=score)
        total, scores = self._opened(index)
        total.add_(piece, alpha=coefficient)
        scores.add_(piece, alpha=score)

    def add_product(self, index: int, left_SO: Tensor, right_SI: Tensor) -> None:
        """Raises NotImplementedError: without norms there is nothing to divide that a plain backward would keep."""
        raise NotImplementedError("sharded sums are those of a backward with norms")

    def add_rows(self, index: int, rows: Tensor, piece_UD: Tensor, *, coefficient: float, score: float) -> None:
        """The same as `add` for a piece that is zero except in `rows`, each of which is named once."""
        if self._is_small[index]:
            return super().add_rows(index, rows, piece_UD, coefficient=coefficient, score=score)
        total, scores = self._opened(index)
        total.index_add_(0, rows, piece_UD, alpha=coefficient)
        scores.index_add_(0, rows, piece_UD, alpha=score)

    def add_weighted(
        self, index: int, piece_nD: Tensor, *, coefficient_n: Sequence[float], score_n: Sequence[float]
    ) -> None:
        """The same as `add` for the pieces of all n segments at once."""
        if self._is_small[index]:
            return super().add_weighted(index, piece_nD, coefficient_n=coefficient_n, score_n=score_n)
        total, scores = self._opened(index)
        total.add_(torch.tensor(coefficient_n, device=piece_nD.device) @ piece_nD)
        scores.add_(torch.tensor(score_n, device=piece_nD.device) @ piece_nD)

    def finish(self, index: int) -> None:
        """Add up what all ranks have of the parameter, and keep this rank's part. Every rank must call it alike."""
        if self._is_small[index]:
            return
        self._opened(index)  # zeros where this rank has no piece
        for sums, whole in zip((self.total, self._scores), self._open.pop(index), strict=True):
            sums[index].add_(self._scatter(whole))
        self._ratios[index] = 0.0  # the total lacks nothing

    def take(self, index: int) -> Tensor:
        """This rank's part of the finished sum, in the parameter's shape."""
        part = super().take(index)
        if self._is_small[index]:
            return part
        shape = whole_shape(self.parameters[index])
        whole = part.new_zeros(self._num_ranks * len(part))
        whole[self._rank * len(part) : (self._rank + 1) * len(part)] = part
        return whole[: shape.numel()].view(shape)

    def _opened(self, index: int) -> tuple[Tensor, Tensor]:
        """The parameter's total and scores of this pass on this rank, in its whole shape."""
        parameter = self.parameters[index]
        shape = whole_shape(parameter)
        if index not in self._open:
            size = self._num_ranks * self._sum_shape(index).numel()
            total, scores = (torch.zeros(size, dtype=torch.float32, device=parameter.device) for _ in range(2))
            self._open[index] = total, scores
        total, scores = (flat[: shape.numel()].view(shape) for flat in self._open[index])
        return total, scores

    def _sum_shape(self, index: int) -> torch.Size:
        whole = super()._sum_shape(index)
        return whole if self._is_small[index] else torch.Size([-(-whole.numel() // self._num_ranks)])
