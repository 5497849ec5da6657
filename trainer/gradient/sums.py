"""The step's gradient sum and, where a baseline is moved afterwards, the open group's score sum.

Independent of modules, passes and of how pieces of a gradient are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.ranks import whole_shape


class GradientSums:
    """Adds pieces c_i G_i to the total and s_i G_i to the open group's score sum. float32.

    `total` has one tensor per parameter, in the parameters' order. It exists between `reset` and `take` only, and is
    complete between groups only: pieces with the same ratio of coefficient to score, such as those of a group's members
    of equal reward, are added to the score sum alone, and the total gets their part when the ratio changes or the group
    closes. One sum is written per piece instead of two.

    >>> sums = GradientSums([torch.zeros(2)], has_scores=True)
    >>> sums.reset()
    >>> sums.add(0, torch.tensor([1.0, 2.0]), coefficient=0.5, score=1.0)
    >>> sums.close_group(shift=0.25)
    >>> sums.take(0)
    tensor([0.2500, 0.5000])
    """

    def __init__(self, parameters: Sequence[Tensor], *, has_scores: bool) -> None:
        self.parameters = list(parameters)
        self.total: list[Tensor] = []
        self.has_scores = has_scores
        self._scores: list[Tensor] = []
        # What the total still lacks: ratio * scores. None: the scores are zero.
        self._ratios: list[float | None] = [None] * len(self.parameters)
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}

    def reset(self) -> None:
        """Start a step with zeros."""
        self.total = self._zeroed(self.total)
        if self.has_scores:
            self._scores = self._zeroed(self._scores)
        self._ratios = [None] * len(self.parameters)

    @property
    def present(self) -> list[Tensor]:
        """The tensors that exist now: the totals, and the open group's scores."""
        return [*self.total, *self._scores]

    def index_of(self, parameter: Tensor) -> int | None:
        """Position of the parameter's sum; None for a parameter that is not trained."""
        return self._index.get(id(parameter))

    def add(self, index: int, piece: Tensor, *, coefficient: float, score: float) -> None:
        """total += coefficient * piece; the open group's scores += score * piece."""
        if not score:
            self.total[index].add_(piece, alpha=coefficient)
            return
        self._defer(index, coefficient / score)
        self._scores[index].add_(piece, alpha=score)

    def add_product(self, index: int, left_SO: Tensor, right_SI: Tensor) -> None:
        """total += left^T right, without an intermediate tensor where the types allow it."""
        if left_SO.dtype == torch.float32:
            self.total[index].addmm_(left_SO.t(), right_SI)
        else:
            self.total[index].add_(product(left_SO, right_SI))

    def add_rows(self, index: int, rows: Tensor, piece_UD: Tensor, *, coefficient: float, score: float) -> None:
        """The same as `add` for a piece that is zero except in `rows`, each of which is named once."""
        ratio = self._deferred(index) if score else 0.0
        self.total[index].index_add_(0, rows, piece_UD, alpha=coefficient - ratio * score)
        if score:
            self._scores[index].index_add_(0, rows, piece_UD, alpha=score)

    def add_weighted(
        self, index: int, piece_nD: Tensor, *, coefficient_n: Sequence[float], score_n: Sequence[float]
    ) -> None:
        """The same as `add` for the pieces of all n segments at once."""
        ratio = self._deferred(index) if any(score_n) else 0.0
        now_n = [coefficient - ratio * score for coefficient, score in zip(coefficient_n, score_n, strict=True)]
        total_D, scores_D = torch.tensor([now_n, score_n], device=piece_nD.device) @ piece_nD
        self.total[index].add_(total_D)
        if any(score_n):
            self._scores[index].add_(scores_D)

    def finish(self, index: int) -> None:
        """Every piece that one module of this pass makes of the parameter has arrived. Here it changes nothing."""

    def close_group(self, shift: float) -> None:
        """Move the group's baseline by `shift`: total -= shift * scores. The next group starts with zero scores."""
        for index, (total, scores) in enumerate(zip(self.total, self._scores, strict=True)):
            if (ratio := self._ratios[index]) is not None:
                total.add_(scores, alpha=ratio - shift)
                scores.zero_()
                self._ratios[index] = None

    def drop_scores(self) -> None:
        """Free the scores' memory after the step's last group."""
        self._scores = []

    def take(self, index: int) -> Tensor:
        """The finished sum of one parameter. It is dropped here, so the caller may change and keep it."""
        taken, self.total[index] = self.total[index], torch.empty(0)
        return taken

    def _deferred(self, index: int) -> float:
        """The ratio at which the total will get the scores; 0, from now on, where there are no scores yet."""
        ratio = self._ratios[index] = self._ratios[index] or 0.0
        return ratio

    def _defer(self, index: int, ratio: float) -> None:
        """From now on the total lacks `ratio` * scores."""
        before = self._ratios[index]
        if before is not None and before != ratio:
            self.total[index].add_(self._scores[index], alpha=before - ratio)
        self._ratios[index] = ratio

    def _sum_shape(self, index: int) -> torch.Size:
        return whole_shape(self.parameters[index])

    def _zeroed(self, present: list[Tensor]) -> list[Tensor]:
        """Zeros in the shape of each parameter's sum, in the present tensors' memory where they fit."""
        shapes = [self._sum_shape(index) for index in range(len(self.parameters))]
        present = present or [torch.empty(0)] * len(shapes)
        return [
            tensor.zero_()
            if tensor.shape == shape
            else torch.zeros(shape, dtype=torch.float32, device=parameter.device)
            for tensor, shape, parameter in zip(present, shapes, self.parameters, strict=True)
        ]


class NoSums(GradientSums):
    """Keeps nothing: a backward whose pieces go here measures score norms only.

    >>> sums = NoSums([torch.zeros(2)])
    >>> sums.add(0, torch.ones(2), coefficient=0.5, score=1.0)
    >>> sums.present
    []
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, has_scores=False)

    def reset(self) -> None:
        """There is nothing to start."""

    def add(self, index: int, piece: Tensor, *, coefficient: float, score: float) -> None:
        """Drop the piece."""

    def add_product(self, index: int, left_SO: Tensor, right_SI: Tensor) -> None:
        """Drop the piece, which is not made."""

    def add_rows(self, index: int, rows: Tensor, piece_UD: Tensor, *, coefficient: float, score: float) -> None:
        """Drop the piece."""

    def add_weighted(
        self, index: int, piece_nD: Tensor, *, coefficient_n: Sequence[float], score_n: Sequence[float]
    ) -> None:
        """Drop the pieces."""


def product(left_SO: Tensor, right_SI: Tensor) -> Tensor:
    """left^T right in float32, accumulated in float32 whatever the inputs' type. [O, I]"""
    if left_SO.dtype == torch.float32:
        return left_SO.t() @ right_SI
    if not left_SO.is_cpu:
        return torch.mm(left_SO.t(), right_SI, out_dtype=torch.float32)
    return left_SO.float().t() @ right_SI.float()
