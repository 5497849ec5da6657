"""Each segment's pieces of a gradient on their way into sums and squared norms, during one packed backward.

A piece is one parameter's gradient from one segment. It is squared, weighted, added and dropped: no gradient of a whole
trajectory is ever held. Independent of modules and of how pieces are made.
Shapes: _n segments of a pack, _S its tokens, _N its action tokens, _U distinct ids of a segment, I and O sizes of a
linear map, D of a norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer import ranks
from trainer.gradient.norms import inner_product, squared_norm
from trainer.gradient.sums import GradientSums, product


class Recorder:
    """Receives the pieces of one pack's backward and keeps each segment's squared norm.

    Set `coefficient_n` and `score_n` between the forward and the backward. Without norms, a single segment that spans
    the pack makes a plain backward.

    Example, as `passes.py` does it::

        recorder = Recorder(sums, bounds=pack.bounds, action_bounds=pack.action_bounds, has_norms=True, ...)
        with recording(model, recorder):
            logprob_N = score(model, pack, recorder).logprob_N
            recorder.coefficient_n = [0.5, -0.5]
            logprob_N.sum().backward()
        norms = recorder.norm2_n.sqrt()

    Args:
        sums: where pieces are added; None measures norms of normalization scales only.
        bounds: [n + 1] positions of the pack's tokens between which each segment lies.
        action_bounds: [n + 1] the same for its action tokens.
        tied_weight: the weight that input embedding and head share; None where each has its own.
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
        # Added up at the end: on a GPU, adding each to a running sum would double the number of small kernels.
        self._norm2: list[list[Tensor]] = [[] for _ in range(len(bounds) - 1)]
        self._vector_norm2: list[Tensor] = []

    @property
    def has_only_vectors(self) -> bool:
        """Whether only norms of normalization scales are measured: the proxy of a score norm."""
        return self._sums is None

    @property
    def norm2_n(self) -> Tensor:
        """Squared norm of each segment's gradient, over the pieces received so far. float64 [n]"""
        norm2_n = torch.zeros(self.num_segments, dtype=torch.float64, device=self.device)
        for segment, parts in enumerate(self._norm2):
            if parts:
                norm2_n[segment] = torch.stack(parts).sum()
        return norm2_n + torch.stack(self._vector_norm2).sum(dim=0) if self._vector_norm2 else norm2_n

    @property
    def num_segments(self) -> int:
        """Trajectories whose norms are measured; 1 in a plain backward."""
        return len(self.coefficient_n)

    def index_of(self, parameter: Tensor | None) -> int | None:
        """Position of the parameter's sum; None for a parameter that is not trained."""
        return None if parameter is None or self._sums is None else self._sums.index_of(parameter)

    def linear(self, weight: Tensor, grad_SO: Tensor, input_SI: Tensor) -> None:
        """Pieces of y = x W^T: segment by segment, G_i^T x_i."""
        if (index := self.index_of(weight)) is None or self._sums is None:
            return
        if not self.has_norms:
            self._sums.add_product(index, grad_SO, input_SI)
        else:
            for segment, (start, end) in enumerate(itertools.pairwise(self.bounds)):
                self.piece(index, segment, product(grad_SO[start:end], input_SI[start:end]))
        self._sums.finish(index)

    def piece(self, index: int, segment: int, piece: Tensor) -> None:
        """One parameter's whole gradient from one segment. float32"""
        assert self._sums is not None
        if self.has_norms:
            self._norm2[segment].append(squared_norm(piece))
        self._sums.add(index, piece, coefficient=self.coefficient_n[segment], score=self.score_n[segment])

    def vectors(self, parameter: Tensor, grad_RD: Tensor) -> None:
        """Pieces of a vector that acts on every token, or on every head of every token: each segment's sum of rows.

        `grad_RD` has R rows, an equal number for each token.
        """
        index = self.index_of(parameter)
        if index is None and not self.has_only_vectors:
            return
        per_token = grad_RD.shape[0] // self.bounds[-1]
        lengths = [(end - start) * per_token for start, end in itertools.pairwise(self.bounds)]
        piece_nD = torch.stack([part.sum(dim=0, dtype=torch.float32) for part in torch.split(grad_RD, lengths)])
        if self.has_norms:
            whole_nD = piece_nD.clone()
            ranks.add_up_sequence(whole_nD)
            self._vector_norm2.append(whole_nD.double().square().sum(dim=1))
        if index is not None and self._sums is not None:
            self._sums.add_weighted(index, piece_nD, coefficient_n=self.coefficient_n, score_n=self.score_n)
            self._sums.finish(index)

    def whole(self, index: int, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """One chunk of the head's gradient in a plain backward."""
        assert self._sums is not None
        self._sums.add_product(index, grad_CV, hidden_CD)

    def head(self, index: int, segment: int, piece_VD: Tensor, ids: Tensor) -> None:
        """The head's whole piece from one segment, whose input tokens are `ids`.

        Where the embedding shares the weight, the rows that both touch are kept for the cross term of the norm.
        """
        if index == self._tied_index:
            self._head_rows[segment] = piece_VD[torch.unique(ids)]
        self.piece(index, segment, piece_VD)

    def head_is_complete(self, index: int) -> None:
        """Every chunk of the head's gradient was passed to `whole` or `head`."""
        assert self._sums is not None
        self._sums.finish(index)

    def embedding(self, weight: Tensor, ids_S: Tensor, grad_SD: Tensor, padding_id: int | None) -> None:
        """Pieces of an embedding look-up. Where the head shares the weight, |a + b|^2 has the cross term 2 <a, b>."""
        if (index := self.index_of(weight)) is None or self._sums is None:
            return
        for segment, (start, end) in enumerate(itertools.pairwise(self.bounds)):
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
        self._sums.finish(index)
