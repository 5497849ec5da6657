"""The two sums of exact norms, each rank with its part of them: 8 bytes a trained parameter over the ranks.

The pieces of one weight are added up on each rank, as long as one module's backward runs, and then summed over ranks
into the parts. So the open group must be the same on all ranks, and every rank must make the same passes. Independent
of how pieces are made and of which rank has which trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.gradient.sums import GradientSums, SumPair
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
    >>> sums.add(0, torch.ones(3, 2), ratio=2.0, score=1.0)
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
        self._open: dict[int, SumPair] = {}

    def reset(self) -> None:
        """Start a step with zeros."""
        super().reset()
        self._open = {}

    def pair(self, index: int) -> SumPair:
        """Where the pieces of a parameter go until `finish`: on this rank only."""
        if self._is_small[index]:
            return super().pair(index)
        if index not in self._open:
            self._open[index] = SumPair(*(self._in_shape(index, self._flat_zeros(index)) for _ in range(2)))
        return self._open[index]

    def finish(self, index: int) -> None:
        """Add up what all ranks have of the parameter, and keep this rank's part. Every rank must call it alike."""
        if self._is_small[index]:
            return
        here, part = self.pair(index), super().pair(index)  # zeros where this rank has no piece
        del self._open[index]
        assert here.scores is not None and part.scores is not None
        if here.ratio is None:
            here.scores.zero_()
        here.settle()
        part.total.add_(self._scatter(self._flat(index, here.total)))
        scores = self._scatter(self._flat(index, here.scores))
        # The total of the part lacks nothing.
        part.add(scores, ratio=0.0, score=1.0)

    def take(self, index: int) -> Tensor:
        """This rank's part of the finished sum, in the parameter's shape."""
        part = super().take(index)
        if self._is_small[index]:
            return part
        whole = self._flat_zeros(index)
        whole[self._rank * len(part) : (self._rank + 1) * len(part)] = part
        return self._in_shape(index, whole)

    def _flat_zeros(self, index: int) -> Tensor:
        """A vector of which each rank has an equal part."""
        size = self._num_ranks * self._sum_shape(index).numel()
        return torch.zeros(size, dtype=torch.float32, device=self.parameters[index].device)

    def _in_shape(self, index: int, flat: Tensor) -> Tensor:
        shape = whole_shape(self.parameters[index])
        return flat[: shape.numel()].view(shape)

    def _flat(self, index: int, whole: Tensor) -> Tensor:
        """The vector that `whole` is the front of."""
        return whole.as_strided((self._num_ranks * self._sum_shape(index).numel(),), (1,))

    def _sum_shape(self, index: int) -> torch.Size:
        whole = super()._sum_shape(index)
        return whole if self._is_small[index] else torch.Size([-(-whole.numel() // self._num_ranks)])
