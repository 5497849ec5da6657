"""Each segment's pieces of a gradient on their way into sums and squared norms, during one packed backward.

Segments of one weight make one product, which is added to the sums; their norms are measured beside it, by token
products or from pieces of their own (trainer/gradient/segments.py). No gradient of a whole trajectory is ever held, and
nothing waits for the device. Independent of modules.
Shapes: _n segments of a pack, _m some of them, _S its tokens, _N its action tokens, I and O sizes of a linear map, D of
a norm or an embedding.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import torch
from torch import Tensor

from trainer.gradient.norms import squared_norm
from trainer.gradient.segment_weights import SegmentWeights
from trainer.gradient.segments import Batch, Segments, Split, lookup_norm2, on_device
from trainer.gradient.sums import GradientSums, product


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Segments that follow one another, of one weight: without pieces of their own, or a single one with.

    Example: `list(recorder.parts([False, False, True]))` are two, if all weights are equal.
    """

    segments: range
    has_piece: bool
    ratio: float
    scale: float


class Recorder:
    """Receives what modules' backwards know of one pack, fills the sums and measures each segment's squared norm.

    Call `weigh` between the forward and the backward, and multiply the backward's seeds by `weights.seed_n`. Without
    norms, a single segment that spans the pack makes a plain backward.

    Example, as `passes.py` does it::

        recorder = Recorder(sums, bounds=pack.bounds, action_bounds=pack.action_bounds, has_norms=True, ...)
        with recording(model, recorder):
            logprob_N = score(model, pack, recorder).logprob_N
            recorder.weigh(ratio_n=[0.5, -0.5], score_n=[1.0, 1.0])
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
        self.sums = sums
        self.segments = Segments(bounds, device)
        self.weights = SegmentWeights.of([1.0] * self.num_segments, [1.0] * self.num_segments)
        self._weight_2n: Tensor | None = None
        self._tied_index = self.index_of(tied_weight)
        self._head_rows: list[Tensor] = []
        # Added up at the end: adding each to a running sum would double the number of small kernels.
        self._norm2: dict[tuple[int, ...], list[Tensor]] = {}
        self._vector_norms: list[Tensor] = []
        self._token_products: dict[tuple[int, ...], Tensor] = {}  # of all maps; their sum is the squared norm
        self._source, self._source_input = 0, cast("weakref.ref[Tensor] | None", None)
        self._products_of: tuple[int, dict[tuple[int, ...], Tensor]] = (-1, {})

    def weigh(self, *, ratio_n: Sequence[float], score_n: Sequence[float]) -> None:
        """Set the segments' weights: ratio_i score_i in the total, score_i >= 0 in the scores."""
        self.weights = weights = SegmentWeights.of(ratio_n, score_n)
        coefficient_n = [ratio * scale for ratio, scale in zip(weights.ratio_n, weights.scale_n, strict=True)]
        self._weight_2n = on_device([coefficient_n, weights.scale_n], self.device).float()

    @property
    def has_only_vectors(self) -> bool:
        """Whether only norms of normalization scales are measured: the proxy of a score norm."""
        return self.sums is None

    @property
    def has_all_tokens(self) -> bool:
        """Whether it is given all tokens of a pack that ranks divide: see divided_recorder.py."""
        return False

    @property
    def norm2_n(self) -> Tensor:
        """Squared norm of each segment's gradient for seeds of 1, over what was received so far. float64 [n]"""
        norm2_n = torch.zeros(self.num_segments, dtype=torch.float64, device=self.device)
        for segments, found in self._norm2.items():
            norm2_n.index_add_(0, on_device(segments, self.device), torch.stack(found).sum(dim=0))
        for segments, sum_mTT in self._token_products.items():
            norm2_n.index_add_(0, on_device(segments, self.device), sum_mTT.sum(dim=(1, 2), dtype=torch.float64))
        if self._vector_norms:
            norm2_n += torch.stack(self._vector_norms).square().sum(dim=0)
        return norm2_n / on_device(self.weights.seed_n, self.device).double().square()

    @property
    def num_segments(self) -> int:
        """Trajectories whose norms are measured; 1 in a plain backward."""
        return len(self.bounds) - 1

    def index_of(self, parameter: Tensor | None) -> int | None:
        """Position of the parameter's sum; None for a parameter that is not trained."""
        return None if parameter is None or self.sums is None else self.sums.index_of(parameter)

    def measured(self, segments: tuple[int, ...], norm2_m: Tensor) -> None:
        """Part of the squared norms of `segments`. float64 [m], or a scalar for one segment"""
        self._norm2.setdefault(segments, []).append(norm2_m.view(-1))

    def parts(self, has_piece_n: Sequence[bool]) -> Iterator[Part]:
        """The segments in their order, as few parts as their weights and pieces allow."""
        for run in self.weights.runs:
            for has_piece, found in groupby(run.segments, key=has_piece_n.__getitem__):
                members = list(found)
                together = [range(i, i + 1) for i in members] if has_piece else [range(members[0], members[-1] + 1)]
                for segments in together:
                    yield Part(segments=segments, has_piece=has_piece, ratio=run.ratio, scale=run.scale)

    def source_of(self, input: Tensor) -> int:
        """A number for the input of a module: that of the module before, if it has the same input."""
        if self._source_input is None or self._source_input() is not input:
            self._source_input = weakref.ref(input)
            self._source += 1
        return self._source

    def linear(self, weight: Tensor, grad_SO: Tensor, input_SI: Tensor, source: int) -> None:
        """y = x W^T: the segments' G_i^T x_i. `source` is that of `source_of`."""
        if (index := self.index_of(weight)) is None or self.sums is None:
            return
        if self.has_norms:
            split = self.segments.split(
                num_in=input_SI.shape[1], num_out=grad_SO.shape[1], has_product=self.sums.keeps_products
            )
            for batch in split.batches:
                self._add_products(batch, batch.products(grad_SO), self._input_products(batch, input_SI, source))
            self._multiply(index, split, grad_SO, input_SI)
        else:
            self.sums.add_product(index, grad_SO, input_SI)
        self.sums.finish(index)

    def _multiply(self, index: int, split: Split, grad_SO: Tensor, input_SI: Tensor) -> None:
        assert self.sums is not None
        for part in self.parts(split.has_piece_n):
            at = slice(self.bounds[part.segments.start], self.bounds[part.segments.stop])
            if part.has_piece:
                self.piece(index, part, product(grad_SO[at], input_SI[at]))
            else:
                self.sums.add_product(index, grad_SO[at], input_SI[at], ratio=part.ratio, score=part.scale)

    def piece(self, index: int, part: Part, piece: Tensor) -> None:
        """One parameter's whole gradient from a single segment. float32"""
        assert self.sums is not None
        self.measured((part.segments.start,), squared_norm(piece))
        self.sums.add(index, piece, ratio=part.ratio, score=part.scale)

    def _add_products(self, batch: Batch, grad_mTT: Tensor, input_mTT: Tensor) -> None:
        if (sum_mTT := self._token_products.get(batch.segments)) is None:
            self._token_products[batch.segments] = grad_mTT.mul_(input_mTT)
        else:
            sum_mTT.addcmul_(grad_mTT, input_mTT)

    def _input_products(self, batch: Batch, input_SI: Tensor, source: int) -> Tensor:
        if self._products_of[0] != source:
            self._products_of = source, {}
        known = self._products_of[1]
        if batch.segments not in known:
            known[batch.segments] = batch.masked_products(input_SI)
        return known[batch.segments]

    def vectors(self, parameter: Tensor, grad_RD: Tensor) -> None:
        """Pieces of a vector that acts on every token, or on every head of every token: each segment's sum of rows.

        `grad_RD` has R rows, an equal number for each token.
        """
        index = self.index_of(parameter)
        if index is None and not self.has_only_vectors:
            return
        num_tokens, size = self.bounds[-1], grad_RD.shape[1]
        piece_nD = self.segments.vector_sums(grad_RD.reshape(num_tokens, -1))
        if piece_nD.shape[1] != size:
            piece_nD = piece_nD.view(self.num_segments, -1, size).sum(dim=1)
        if self.has_norms:
            self._vector_norms.append(torch.linalg.vector_norm(piece_nD, dim=1, dtype=torch.float64))
        if index is not None and self.sums is not None:
            self.sums.add_weighted(index, piece_nD, self._weights() if self.has_norms else None)
            self.sums.finish(index)

    def head_rows(self, index: int, rows_TD: Tensor) -> None:
        """Of the next segment's gradient of the head: the rows of its input tokens' ids, with repetitions.

        Needed where the embedding shares the weight, for the cross term of the norm.
        """
        if index == self._tied_index:
            self._head_rows.append(rows_TD)

    @property
    def needs_head_rows(self) -> bool:
        """Whether `head_rows` must be called for every segment."""
        return self.has_norms and self._tied_index is not None

    def embedding(self, weight: Tensor, ids_S: Tensor, grad_SD: Tensor, padding_id: int | None) -> None:
        """Pieces of an embedding look-up. Where the head shares the weight, |a + b|^2 has the cross term 2 <a, b>."""
        if (index := self.index_of(weight)) is None or self.sums is None:
            return
        grad_SD = grad_SD.float()
        if padding_id is not None:
            grad_SD = grad_SD.masked_fill((ids_S == padding_id)[:, None], 0.0)
        if self.has_norms:
            everyone = tuple(range(self.num_segments))
            self.measured(everyone, lookup_norm2(self.segments, ids_S, grad_SD, weight.shape[0]))
            if index == self._tied_index:
                cross_S = (torch.cat(self._head_rows) * grad_SD).sum(dim=1, dtype=torch.float64)
                self._head_rows = []
                self.measured(everyone, 2 * self.segments.sums(cross_S))
            self.sums.add_rows(index, ids_S, grad_SD, self._weights()[:, self.segments.segment_S])
        else:
            self.sums.add_rows(index, ids_S, grad_SD)
        self.sums.finish(index)

    def _weights(self) -> Tensor:
        """Of the total and of the scores. float32 [2, n]"""
        if self._weight_2n is None:
            self.weigh(ratio_n=self.weights.ratio_n, score_n=self.weights.scale_n)
        assert self._weight_2n is not None
        return self._weight_2n
