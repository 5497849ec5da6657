"""The step's gradient sum and, where a baseline is moved afterwards, the open group's score sum.

Independent of modules, passes and of how pieces of a gradient are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.ranks import whole_shape


class SumPair:
    """One parameter's total and, if there are any, scores: total += c G, scores += s G, with c = ratio s. float32.

    The total is complete after `settle` only: pieces with the same ratio, such as those of a group's members of equal
    reward, are added to the scores alone, and the total gets their part when the ratio changes or the group closes. One
    sum is written per piece instead of two. Scores of a new group are written over those of the last one, which need
    no zeros.

    >>> pair = SumPair(torch.zeros(2), torch.empty(2))
    >>> pair.add(torch.tensor([1.0, 2.0]), ratio=0.5, score=1.0)
    >>> pair.settle(shift=0.25)
    >>> pair.total
    tensor([0.2500, 0.5000])
    """

    def __init__(self, total: Tensor, scores: Tensor | None) -> None:
        self.total, self.scores = total, scores
        self.ratio: float | None = None
        """The total lacks ratio * scores. None: the scores count as zero, whatever they contain."""

    def add(self, piece: Tensor, *, ratio: float, score: float) -> None:
        """A piece in the parameter's shape."""
        if self.scores is None:
            self.total.add_(piece, alpha=ratio * score)
        elif score:
            if self._is_first(ratio):
                torch.mul(piece, score, out=self.scores)
            else:
                self.scores.add_(piece, alpha=score)

    def add_product(self, left_SO: Tensor, right_SI: Tensor, *, ratio: float, score: float) -> None:
        """The piece left^T right, without an intermediate tensor where the types allow it."""
        if self.scores is None:
            _add_product(self.total, left_SO, right_SI, beta=1.0, alpha=ratio * score)
        elif score:
            _add_product(self.scores, left_SO, right_SI, beta=0.0 if self._is_first(ratio) else 1.0, alpha=score)

    def add_rows(self, rows_S: Tensor, grad_SD: Tensor, weight_2S: Tensor | None) -> None:
        """Adds grad_SD[t], weighted by weight_2S[:, t] = (c, s), or by (1, 0) without weights, to row rows_S[t]."""
        if weight_2S is None:
            self.total.index_add_(0, rows_S, grad_SD)
            return
        now_S = weight_2S[0] - self.ratio * weight_2S[1] if self.ratio else weight_2S[0]  # the rest is deferred
        self.total.index_add_(0, rows_S, grad_SD * now_S[:, None])
        if self.scores is not None:
            self._present_scores().index_add_(0, rows_S, grad_SD * weight_2S[1][:, None])

    def add_weighted(self, piece_nD: Tensor, weight_2n: Tensor | None) -> None:
        """The pieces of all n segments at once, weighted by weight_2n = (c, s), or by (1, 0) without weights."""
        if weight_2n is None:
            self.total.add_(piece_nD[0] if len(piece_nD) == 1 else piece_nD.sum(dim=0))
            return
        for_total_D, for_scores_D = weight_2n @ piece_nD
        self.total.add_(for_total_D)
        if self.scores is None:
            return
        if self.ratio is None:
            self.scores.copy_(for_scores_D)
            self.ratio = 0.0
            return
        self.scores.add_(for_scores_D)
        if self.ratio:
            self.total.add_(for_scores_D, alpha=-self.ratio)

    def settle(self, shift: float = 0.0) -> None:
        """Complete the total and move the baseline: total += (ratio - shift) scores. The scores then count as zero."""
        if self.ratio is not None and self.scores is not None:
            self.total.add_(self.scores, alpha=self.ratio - shift)
            self.ratio = None

    def _present_scores(self) -> Tensor:
        assert self.scores is not None
        if self.ratio is None:
            self.scores.zero_()
            self.ratio = 0.0
        return self.scores

    def _is_first(self, ratio: float) -> bool:
        """From now on the total lacks `ratio` * scores. Returns whether the scores have to be written over."""
        before, self.ratio = self.ratio, ratio
        if before is not None and before != ratio:
            assert self.scores is not None
            self.total.add_(self.scores, alpha=before - ratio)
        return before is None


class GradientSums:
    """Adds pieces c_i G_i to the total and s_i G_i to the open group's score sum, with c_i = ratio_i s_i. float32.

    `total` has one tensor per parameter, in the parameters' order. It exists between `reset` and `take` only, and is
    complete between groups only: see `SumPair`.

    >>> sums = GradientSums([torch.zeros(2)], has_scores=True)
    >>> sums.reset()
    >>> sums.add(0, torch.tensor([1.0, 2.0]), ratio=0.5, score=1.0)
    >>> sums.close_group(shift=0.25)
    >>> sums.take(0)
    tensor([0.2500, 0.5000])
    """

    keeps_products = True
    """Whether products of rows are wanted; else only norms are measured."""

    def __init__(self, parameters: Sequence[Tensor], *, has_scores: bool) -> None:
        self.parameters = list(parameters)
        self.has_scores = has_scores
        self._pairs: list[SumPair] = []
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}

    @property
    def total(self) -> list[Tensor]:
        """One tensor per parameter."""
        return [pair.total for pair in self._pairs]

    @property
    def scores(self) -> list[Tensor]:
        """The open group's, one tensor per parameter, for those that have been added to."""
        return [pair.scores for pair in self._pairs if pair.scores is not None]

    def reset(self) -> None:
        """Start a step with zeros, in the present tensors' memory where they fit."""
        pairs = self._pairs or [SumPair(torch.empty(0), None) for _ in self.parameters]
        self._pairs = [self._started(index, pair) for index, pair in enumerate(pairs)]

    @property
    def present(self) -> list[Tensor]:
        """The tensors that exist now: the totals, and the open group's scores."""
        return [*self.total, *self.scores]

    def index_of(self, parameter: Tensor) -> int | None:
        """Position of the parameter's sum; None for a parameter that is not trained."""
        return self._index.get(id(parameter))

    def add(self, index: int, piece: Tensor, *, ratio: float, score: float) -> None:
        """total += ratio * score * piece; the open group's scores += score * piece."""
        self.pair(index).add(piece, ratio=ratio, score=score)

    def add_product(
        self, index: int, left_SO: Tensor, right_SI: Tensor, *, ratio: float = 1.0, score: float = 1.0
    ) -> None:
        """The same for the piece left^T right."""
        self.pair(index).add_product(left_SO, right_SI, ratio=ratio, score=score)

    def add_rows(self, index: int, rows_S: Tensor, grad_SD: Tensor, weight_2S: Tensor | None = None) -> None:
        """The same for rows of a piece: grad_SD[t] belongs to row rows_S[t] and has the weights weight_2S[:, t], of
        the total and of the scores. Rows may be named several times."""
        self.pair(index).add_rows(rows_S, grad_SD, weight_2S)

    def add_weighted(self, index: int, piece_nD: Tensor, weight_2n: Tensor | None = None) -> None:
        """The same for the pieces of all n segments, with weight_2n: of the total and of the scores."""
        self.pair(index).add_weighted(piece_nD, weight_2n)

    def pair(self, index: int) -> SumPair:
        """Where the pieces of a parameter go in this pass."""
        return self._pairs[index]

    def finish(self, index: int) -> None:
        """Every piece that one module of this pass makes of the parameter has arrived. Here it changes nothing."""

    def close_group(self, shift: float) -> None:
        """Move the group's baseline by `shift`: total -= shift * scores. The next group starts with zero scores."""
        for pair in self._pairs:
            pair.settle(shift)

    def drop_scores(self) -> None:
        """Free the scores' memory after the step's last group."""
        for pair in self._pairs:
            pair.scores = None

    def take(self, index: int) -> Tensor:
        """The finished sum of one parameter. It is dropped here, so the caller may change and keep it."""
        pair = self._pairs[index]
        taken, pair.total = pair.total, torch.empty(0)
        return taken

    def _sum_shape(self, index: int) -> torch.Size:
        return whole_shape(self.parameters[index])

    def _started(self, index: int, before: SumPair) -> SumPair:
        shape, device = self._sum_shape(index), self.parameters[index].device
        total = before.total.zero_() if before.total.shape == shape else _zeros(shape, device)
        if not self.has_scores:
            return SumPair(total, None)
        return SumPair(total, before.scores if before.scores is not None else _zeros(shape, device))


class NoSums(GradientSums):
    """Keeps nothing: a backward whose pieces go here measures score norms only.

    >>> sums = NoSums([torch.zeros(2)])
    >>> sums.add(0, torch.ones(2), ratio=0.5, score=1.0)
    >>> sums.present
    []
    """

    keeps_products = False

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, has_scores=False)

    def reset(self) -> None:
        """There is nothing to start."""

    def add(self, index: int, piece: Tensor, *, ratio: float, score: float) -> None:
        """Drop the piece."""

    def add_product(
        self, index: int, left_SO: Tensor, right_SI: Tensor, *, ratio: float = 1.0, score: float = 1.0
    ) -> None:
        """Drop the piece, which is not made."""

    def add_rows(self, index: int, rows_S: Tensor, grad_SD: Tensor, weight_2S: Tensor | None = None) -> None:
        """Drop the rows."""

    def add_weighted(self, index: int, piece_nD: Tensor, weight_2n: Tensor | None = None) -> None:
        """Drop the pieces."""


def product(left_SO: Tensor, right_SI: Tensor, *, out: Tensor | None = None) -> Tensor:
    """left^T right in float32, accumulated in float32 whatever the inputs' type. [O, I]"""
    if left_SO.dtype != torch.float32 and not left_SO.is_cpu:
        return torch.mm(left_SO.t(), right_SI, out_dtype=torch.float32, out=out)
    return torch.mm(left_SO.float().t(), right_SI.float(), out=out)


def grown(piece: Tensor | None, left_SO: Tensor, right_SI: Tensor) -> Tensor:
    """piece + left^T right, in float32, in the piece's memory. [O, I]"""
    if piece is None:
        return product(left_SO, right_SI)
    _add_product(piece, left_SO, right_SI, beta=1.0, alpha=1.0)
    return piece


def _add_product(total: Tensor, left_SO: Tensor, right_SI: Tensor, *, beta: float, alpha: float) -> None:
    """total = beta total + alpha left^T right."""
    if left_SO.dtype == torch.float32:
        total.addmm_(left_SO.t(), right_SI, beta=beta, alpha=alpha)
    elif beta:
        total.add_(product(left_SO, right_SI), alpha=alpha)
    else:
        product(left_SO, right_SI, out=total)
        if alpha != 1.0:
            total.mul_(alpha)


def _zeros(shape: torch.Size, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=device)
