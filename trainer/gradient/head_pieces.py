"""The output head's gradient, which arrives in chunks of action tokens, on its way to the recorder.

Independent of how logits are made and of losses.
Shapes: _C tokens of a chunk, _V vocabulary, _D hidden size, _T tokens of a segment, _N its action tokens.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from trainer.gradient.recorder import Part, Recorder
from trainer.gradient.segments import longest_by_tokens
from trainer.gradient.sums import grown, product


class HeadPieces:
    """Cuts the head's gradient into segments: their norms, and one product for segments of one weight in a chunk.

    A segment has a piece of its own, [V, D], if that is cheaper than token products or if a chunk cuts it.

    Example::

        pieces = HeadPieces(recorder, head.weight, pack.input_ids_S, rows=1024)
        pieces.add(slice(0, 1024), grad_CV, hidden_CD)  # for every chunk
        pieces.close()

    Args:
        ids_S: the input tokens of the pack.
        rows: tokens of a chunk, at most. Chunks consist of whole segments or of a part of one.
    """

    def __init__(self, recorder: Recorder, weight_VD: Tensor, ids_S: Tensor, *, rows: int) -> None:
        self._recorder, self._ids_S = recorder, ids_S
        self._index = recorder.index_of(weight_VD)
        self._piece: Tensor | None = None
        if self._index is None or recorder.sums is None or not recorder.has_norms:
            return
        num_out, num_in = weight_VD.shape
        longest = longest_by_tokens(num_in, num_out, ids_S.device.type, has_product=recorder.sums.keeps_products)
        lengths = [end - start for start, end in pairwise(recorder.action_bounds)]
        self._parts = list(recorder.parts([length > min(longest, rows) for length in lengths]))

    def add(self, at: slice, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """The chunk of the action tokens `at`."""
        recorder = self._recorder
        if self._index is None or recorder.sums is None:
            return
        if not recorder.has_norms:
            recorder.sums.add_product(self._index, grad_CV, hidden_CD)
            return
        bounds = recorder.action_bounds
        for part in self._parts:
            start, end = max(at.start, bounds[part.segments.start]), min(at.stop, bounds[part.segments.stop])
            if start >= end:
                continue
            inside = slice(start - at.start, end - at.start)
            if part.has_piece:
                self._grow(part, grad_CV[inside], hidden_CD[inside], is_last=end == bounds[part.segments.stop])
            else:
                self._measure(part, at, grad_CV, hidden_CD)
                recorder.sums.add_product(
                    self._index, grad_CV[inside], hidden_CD[inside], ratio=part.ratio, score=part.scale
                )

    def close(self) -> None:
        """There are no more chunks."""
        if self._index is not None and self._recorder.sums is not None:
            self._recorder.sums.finish(self._index)

    def _grow(self, part: Part, grad_NV: Tensor, hidden_ND: Tensor, *, is_last: bool) -> None:
        assert self._index is not None
        self._piece = grown(self._piece, grad_NV, hidden_ND)
        if is_last:
            if self._recorder.needs_head_rows:
                self._recorder.head_rows(self._index, self._piece[self._ids(part.segments.start)])
            self._recorder.piece(self._index, part, self._piece)
            self._piece = None

    def _measure(self, part: Part, at: slice, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """Norms of the part's segments that lie in the chunk."""
        assert self._index is not None
        bounds = self._recorder.action_bounds
        for segment in part.segments:
            if bounds[segment] < at.start or bounds[segment + 1] > at.stop:
                continue
            inside = slice(bounds[segment] - at.start, bounds[segment + 1] - at.start)
            grad_NV, hidden_ND = grad_CV[inside], hidden_CD[inside]
            products_NN = product(grad_NV.t(), grad_NV.t()) * product(hidden_ND.t(), hidden_ND.t())
            self._recorder.measured((segment,), products_NN.sum(dtype=torch.float64))
            if self._recorder.needs_head_rows:
                rows_TD = product(grad_NV[:, self._ids(segment)], hidden_ND)
                self._recorder.head_rows(self._index, rows_TD)

    def _ids(self, segment: int) -> Tensor:
        start, end = self._recorder.bounds[segment : segment + 2]
        return self._ids_S[start:end]
