"""Where the pieces of a gradient go: the step's sum, the open group's score sum, each segment's squared norm.

A piece is one parameter's gradient from one segment. It is squared, weighted, added and forgotten; no gradient of a
whole trajectory is ever held. Knows nothing of modules or of how pieces are made.
Shapes: _n segments of a pack, _S its tokens, _N its action tokens, I and O sizes of a linear map, D of a norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.gradient.norms import inner_product, squared_norm


def full_shape(parameter: Tensor) -> torch.Size:
    """Shape of the whole parameter, also where ZeRO-3 divided it among ranks."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


class GradientSums:
    """The step's sum and, where a baseline is to be moved afterwards, the open group's score sum. float32.

    `total` has one tensor a parameter, in the parameters' order; it is only there between `reset` and `take`, and
    complete between groups only. Pieces with one and the same ratio of coefficient to score, such as those of a
    group's members of equal reward, are added to the score sum alone; the total gets their part when the ratio changes
    or the group closes. One sum is written for a piece instead of two.
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
        """Start a step."""
        self.total = self._zeroed(self.total)
        if self.has_scores:
            self._scores = self._zeroed(self._scores)
        self._ratios = [None] * len(self.parameters)

    def index_of(self, parameter: Tensor) -> int | None:
        """Where the parameter's sum lies; None for one that is not trained."""
        return self._index.get(id(parameter))

    def add(self, index: int, piece: Tensor, *, coefficient: float, score: float) -> None:
        """total += coefficient * piece; the open group's scores += score * piece."""
        if not score:
            self.total[index].add_(piece, alpha=coefficient)
            return
        self._owe(index, coefficient / score)
        self._scores[index].add_(piece, alpha=score)

    def add_product(self, index: int, left_SO: Tensor, right_SI: Tensor) -> None:
        """total += left^T right, without a piece in between where the types allow it."""
        if left_SO.dtype == torch.float32:
            self.total[index].addmm_(left_SO.t(), right_SI)
        else:
            self.total[index].add_(product(left_SO, right_SI))

    def add_rows(self, index: int, rows: Tensor, piece_UD: Tensor, *, coefficient: float, score: float) -> None:
        """The same as `add` for a piece that is zero but in some rows, each named once."""
        ratio = self._owed(index) if score else 0.0
        self.total[index].index_add_(0, rows, piece_UD, alpha=coefficient - ratio * score)
        if score:
            self._scores[index].index_add_(0, rows, piece_UD, alpha=score)

    def add_weighted(
        self, index: int, piece_nD: Tensor, *, coefficient_n: Sequence[float], score_n: Sequence[float]
    ) -> None:
        """The same for the pieces of all segments at once."""
        ratio = self._owed(index) if any(score_n) else 0.0
        now_n = [coefficient - ratio * score for coefficient, score in zip(coefficient_n, score_n, strict=True)]
        total_D, scores_D = torch.tensor([now_n, score_n], device=piece_nD.device) @ piece_nD
        self.total[index].add_(total_D)
        if any(score_n):
            self._scores[index].add_(scores_D)

    def close_group(self, shift: float) -> None:
        """Move the group's baseline by `shift`: total -= shift * scores. The next group starts empty."""
        for index, (total, scores) in enumerate(zip(self.total, self._scores, strict=True)):
            if (ratio := self._ratios[index]) is not None:
                total.add_(scores, alpha=ratio - shift)
                scores.zero_()
                self._ratios[index] = None

    def _owed(self, index: int) -> float:
        """The ratio at which the total will get the scores; decided here where there are none yet."""
        ratio = self._ratios[index] = self._ratios[index] or 0.0
        return ratio

    def _owe(self, index: int, ratio: float) -> None:
        """From now on the total lacks `ratio` * scores."""
        before = self._ratios[index]
        if before is not None and before != ratio:
            self.total[index].add_(self._scores[index], alpha=before - ratio)
        self._ratios[index] = ratio

    def take(self, index: int) -> Tensor:
        """The finished sum of one parameter, which is forgotten here: whoever takes it may change and keep it."""
        taken, self.total[index] = self.total[index], torch.empty(0)
        return taken

    def _zeroed(self, present: list[Tensor]) -> list[Tensor]:
        shapes = [full_shape(parameter) for parameter in self.parameters]
        present = present or [torch.empty(0)] * len(shapes)
        return [
            tensor.zero_()
            if tensor.shape == shape
            else torch.zeros(shape, dtype=torch.float32, device=parameter.device)
            for tensor, shape, parameter in zip(present, shapes, self.parameters, strict=True)
        ]


class Recorder:
    """Takes the pieces of one pack's backward. Its coefficients must be set between the forward and the backward.

    With `sums` None only norms are taken. With a single segment that spans the pack and no norms it is a plain
    backward. `tied_weight`: of an embedding that shares it with the head.
    """

    def __init__(
        self,
        sums: GradientSums | None,
        *,
        bounds: Sequence[int],
        action_bounds: Sequence[int],
        has_norms: bool,
        tied_weight: Tensor | None,
        device: torch.device,
    ) -> None:
        self.bounds = tuple(bounds)
        self.action_bounds = tuple(action_bounds)
        self.has_norms = has_norms
        self.device = device
        self.coefficient_n = [1.0] * (len(bounds) - 1)
        self.score_n = [0.0] * (len(bounds) - 1)
        self._sums = sums
        self._tied_index = self.index_of(tied_weight)
        self._head_rows: dict[int, Tensor] = {}
        # Kept one by one: to add up on a GPU would take more small calls than the sums themselves.
        self._norm2: list[list[Tensor]] = [[] for _ in range(len(bounds) - 1)]
        self._vector_norm2: list[Tensor] = []

    @property
    def has_only_vectors(self) -> bool:
        """Whether only norms of normalisation scales are wanted: the proxy of a norm."""
        return self._sums is None

    @property
    def norm2_n(self) -> Tensor:
        """Squared norm of each segment's gradient, of what the backward has given so far. float64"""
        norm2_n = torch.zeros(self.num_segments, dtype=torch.float64, device=self.device)
        for segment, parts in enumerate(self._norm2):
            if parts:
                norm2_n[segment] = torch.stack(parts).sum()
        return norm2_n + torch.stack(self._vector_norm2).sum(dim=0) if self._vector_norm2 else norm2_n

    @property
    def num_segments(self) -> int:
        """Trajectories whose norms are taken; 1 in a plain backward."""
        return len(self.coefficient_n)

    def index_of(self, parameter: Tensor | None) -> int | None:
        """Where the parameter's sum lies; None for one that is not trained."""
        return None if parameter is None or self._sums is None else self._sums.index_of(parameter)

    def linear(self, weight: Tensor, grad_SO: Tensor, input_SI: Tensor) -> None:
        """Pieces of y = x W^T: segment by segment, G_i^T x_i."""
        if (index := self.index_of(weight)) is None or self._sums is None:
            return
        if not self.has_norms:
            self._sums.add_product(index, grad_SO, input_SI)
            return
        for segment, (start, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            self.piece(index, segment, product(grad_SO[start:end], input_SI[start:end]))

    def piece(self, index: int, segment: int, piece: Tensor) -> None:
        """One parameter's whole gradient from one segment, float32."""
        assert self._sums is not None
        if self.has_norms:
            self._norm2[segment].append(squared_norm(piece))
        self._sums.add(index, piece, coefficient=self.coefficient_n[segment], score=self.score_n[segment])

    def vectors(self, parameter: Tensor, grad_RD: Tensor) -> None:
        """Pieces of a vector that acts on every token, or on every head of it: per segment, the sum of its rows."""
        index = self.index_of(parameter)
        if index is None and not self.has_only_vectors:
            return
        per_token = grad_RD.shape[0] // self.bounds[-1]
        lengths = [(end - start) * per_token for start, end in itertools.pairwise(self.bounds)]
        piece_nD = torch.stack([part.sum(dim=0, dtype=torch.float32) for part in torch.split(grad_RD, lengths)])
        if self.has_norms:
            self._vector_norm2.append(piece_nD.double().square().sum(dim=1))
        if index is not None and self._sums is not None:
            self._sums.add_weighted(index, piece_nD, coefficient_n=self.coefficient_n, score_n=self.score_n)

    def whole(self, index: int, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """A part of the head's gradient in a plain backward."""
        assert self._sums is not None
        self._sums.add_product(index, grad_CV, hidden_CD)

    def head(self, index: int, segment: int, piece_VD: Tensor, ids: Tensor) -> None:
        """The head's whole piece from one segment, which reads `ids`.

        Where the embedding has the same weight, the rows that both touch are kept for the cross term of the norm.
        """
        if index == self._tied_index:
            self._head_rows[segment] = piece_VD[torch.unique(ids)]
        self.piece(index, segment, piece_VD)

    def embedding(self, weight: Tensor, ids_S: Tensor, grad_SD: Tensor, padding_id: int | None) -> None:
        """Pieces of a look-up. Where the head shares the weight, |a + b|^2 has the cross term 2 <a, b>."""
        if (index := self.index_of(weight)) is None or self._sums is None:
            return
        for segment, (start, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            ids_U, inverse = torch.unique(ids_S[start:end], return_inverse=True)
            piece_UD = torch.zeros(len(ids_U), grad_SD.shape[1], device=grad_SD.device)
            piece_UD.index_add_(0, inverse, grad_SD[start:end].float())
            if padding_id is not None:
                piece_UD[ids_U == padding_id] = 0
            if self.has_norms:
                self._norm2[segment].append(squared_norm(piece_UD))
                if (head_UD := self._head_rows.pop(segment, None)) is not None:
                    self._norm2[segment].append(2 * inner_product(head_UD, piece_UD))
            self._sums.add_rows(
                index, ids_U, piece_UD, coefficient=self.coefficient_n[segment], score=self.score_n[segment]
            )


def product(left_SO: Tensor, right_SI: Tensor) -> Tensor:
    """left^T right in float32, summed in float32 whatever the inputs are. [O, I]"""
    if left_SO.dtype == torch.float32:
        return left_SO.t() @ right_SI
    if left_SO.is_cuda:
        return torch.mm(left_SO.t(), right_SI, out_dtype=torch.float32)
    return left_SO.float().t() @ right_SI.float()
