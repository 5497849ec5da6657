"""How the squared norms of one linear map's gradient, segment by segment of a pack, are measured.

The gradient of segment i is G_i^T X_i, with the rows G_i of the output's gradient and X_i of the input. Its squared
norm needs no product of the weight's size:

    |G_i^T X_i|^2 = sum_tu (G_i G_i^T)_tu (X_i X_i^T)_tu        2 T^2 (I + O) operations for T tokens

(Goodfellow, "Efficient per-example gradient computations", arXiv:1510.01799, for one token; Li et al.,
arXiv:2110.05679, eq. 4, for sequences.) Long segments have a piece of their own, G_i^T X_i in float32, which is squared
and then added to the sums: the same operations as in a plain backward, but the piece is written and read again. So

    token products are cheaper while    2 T^2 (I + O) / F  <  16 I O / W        T^2 < 8 (F / W) I O / (I + O)

for F operations and W bytes a second: a piece costs 16 bytes an element more than its share of a common product
(written, read for its square, and read once more and its sum written once more when it is added). Where no sums are
kept, the piece's own 2 T I O operations count too, and its addition does not.

Error of a token product, with u = 2^-24 (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1): at
most (I + O + M) u (sum_t |g_t| |x_t|)^2 in any order of addition, for M maps whose products are added up. Pieces of
tokens cancel where they disagree: for T independent ones the squared norm is 1/T of that parenthesis.
tests/trainer/gradient/test_segments.py holds the error to this bound, and without cancellation to 5e-6 of the squared
norm; at most 6.5e-7 was measured (400 random segments of up to 300 tokens).

Independent of models and sums.
Shapes: _S tokens of a pack, _n its segments, _m segments of a batch, T tokens of its longest, I and O sizes of a map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from trainer.gradient.norms import row_squared_norms
from trainer.gradient.sums import product

FLOP_PER_BYTE = {"cpu": 3.0, "cuda": 160.0, "meta": 160.0}
"""F / W: measured on an AMD EPYC core (89 GFLOP/s, 57 GB/s); a GPU's is of its half-precision products [estimate]."""

LAUNCH_FLOP = {"cpu": 1e6, "cuda": 1e10, "meta": 1e10}
"""Operations that the device could make while one batch's kernels are launched."""


def longest_by_tokens(num_in: int, num_out: int, device_type: str, *, has_product: bool) -> int:
    """The longest segment whose squared norm is cheaper from token products than from its piece.

    `has_product`: whether the piece would also serve as the segment's product in the sums.

    >>> longest_by_tokens(1536, 8960, "cuda", has_product=True)
    1295
    """
    harmonic = num_in * num_out / (num_in + num_out)
    balance = FLOP_PER_BYTE[device_type]
    if has_product:
        return math.isqrt(int(8 * balance * harmonic))
    return int((harmonic + math.sqrt(harmonic**2 + 16 * balance * harmonic)) / 2)


def batches(lengths: Sequence[int], width: int, launch_flop: float) -> list[list[int]]:
    """Which segments are padded to one length: the least 2 m T^2 `width` over all batches, plus their launches.

    Returns lists of indices into `lengths`, longest first; each index occurs once.

    >>> batches([100, 8, 98, 9], width=1000, launch_flop=1e6)
    [[0, 2], [3, 1]]
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    best, cut = [0.0], [0]  # of the first segments in this order
    for end in range(1, len(order) + 1):
        costs = [
            (best[start] + 2.0 * width * (end - start) * lengths[order[start]] ** 2 + launch_flop, start)
            for start in range(end)
        ]
        cost, start = min(costs)
        best.append(cost)
        cut.append(start)
    found, end = [], len(order)
    while end:
        found.append(order[cut[end] : end])
        end = cut[end]
    return found[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Segments whose token products are made together, padded to the longest.

    Example: `(batch.products(grad_SO) * batch.masked_products(input_SI)).sum(dim=(1, 2))` are their squared norms. [m]

    `row_mT` has each row's position in the pack, or is None where the segments follow one another and are equally long.
    """

    segments: tuple[int, ...]
    start: int  # of the first segment
    length: int  # T
    row_mT: Tensor | None  # padding repeats a segment's last row, so that a NaN stays in its own segment
    is_padding_mTT: Tensor | None  # where one of two tokens is padding

    def rows(self, rows_SD: Tensor) -> Tensor:
        """The batch's rows. [m, T, D]"""
        if self.row_mT is None:
            at = slice(self.start, self.start + len(self.segments) * self.length)
            return rows_SD[at].view(len(self.segments), self.length, -1)
        return rows_SD.index_select(0, self.row_mT).view(len(self.segments), self.length, -1)

    def products(self, rows_SD: Tensor) -> Tensor:
        """Inner products of each segment's rows with one another, accumulated in float32. [m, T, T]"""
        rows_mTD = self.rows(rows_SD)
        if rows_mTD.dtype != torch.float32 and not rows_mTD.is_cpu:
            return torch.bmm(rows_mTD, rows_mTD.mT, out_dtype=torch.float32)
        return torch.bmm(rows_mTD.float(), rows_mTD.float().mT)

    def masked_products(self, rows_SD: Tensor) -> Tensor:
        """The same with 0 where a row is padding."""
        products_mTT = self.products(rows_SD)
        return products_mTT if self.is_padding_mTT is None else products_mTT.masked_fill_(self.is_padding_mTT, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Which segments of a pack have their norms from token products, for maps of one shape, and which from pieces.

    Example: `Segments((0, 3, 5), device).split(num_in=16, num_out=48, has_product=True).has_piece_n`.
    """

    batches: tuple[Batch, ...]
    has_piece_n: tuple[bool, ...]


class Segments:
    """The segments of one pack, between `bounds`. What it plans for a shape of weights is kept.

    Example::

        segments = Segments((0, 3, 5), device)
        split = segments.split(num_in=16, num_out=48, has_product=True)
        [batch.segments for batch in split.batches], split.has_piece_n
    """

    def __init__(self, bounds: Sequence[int], device: torch.device) -> None:
        self.bounds = tuple(bounds)
        self.lengths = [end - start for start, end in pairwise(bounds)]
        self._device = device
        self._splits: dict[tuple[int, int, bool], Split] = {}
        self._batches: dict[tuple[int, ...], Batch] = {}
        self._members: dict[torch.dtype, Tensor] = {}  # [S, n]: 1 where a token belongs to the segment

    @cached_property
    def segment_S(self) -> Tensor:
        """Each token's segment. int64"""
        return on_device([i for i, length in enumerate(self.lengths) for _ in range(length)], self._device)

    def sums(self, value_S: Tensor) -> Tensor:
        """Each segment's sum of a number per token. float64 [n]"""
        zeros_n = torch.zeros(len(self.lengths), dtype=torch.float64, device=self._device)
        return zeros_n.index_add_(0, self.segment_S, value_S.double())

    def vector_sums(self, rows_SD: Tensor) -> Tensor:
        """Each segment's sum of rows. float32 [n, D]"""
        if len(self.lengths) == 1:
            return rows_SD.sum(dim=0, keepdim=True, dtype=torch.float32)
        if rows_SD.dtype not in self._members:
            one_hot_Sn = torch.nn.functional.one_hot(self.segment_S, len(self.lengths))
            self._members[rows_SD.dtype] = one_hot_Sn.to(rows_SD.dtype)
        return product(self._members[rows_SD.dtype], rows_SD)

    def split(self, *, num_in: int, num_out: int, has_product: bool) -> Split:
        """The plan for the weight [num_out, num_in]."""
        key = (num_in, num_out, has_product)
        if key not in self._splits:
            longest = longest_by_tokens(num_in, num_out, self._device.type, has_product=has_product)
            short = [index for index, length in enumerate(self.lengths) if length <= longest]
            lengths = [self.lengths[index] for index in short]
            found = batches(lengths, num_in + num_out, LAUNCH_FLOP[self._device.type])
            self._splits[key] = Split(
                batches=tuple(self._batch(tuple(sorted(short[at] for at in one))) for one in found),
                has_piece_n=tuple(length > longest for length in self.lengths),
            )
        return self._splits[key]

    def _batch(self, segments: tuple[int, ...]) -> Batch:
        if segments not in self._batches:
            self._batches[segments] = self._planned(segments)
        return self._batches[segments]

    def _planned(self, segments: tuple[int, ...]) -> Batch:
        lengths = [self.lengths[segment] for segment in segments]
        start, longest = self.bounds[segments[0]], max(lengths)
        if min(lengths) == longest and segments[-1] - segments[0] == len(segments) - 1:
            return Batch(segments=segments, start=start, length=longest, row_mT=None, is_padding_mTT=None)
        rows = [
            self.bounds[segment] + min(t, length - 1)
            for segment, length in zip(segments, lengths, strict=True)
            for t in range(longest)
        ]
        padding_mT = on_device([[t >= length for t in range(longest)] for length in lengths], self._device)
        return Batch(
            segments=segments,
            start=start,
            length=longest,
            row_mT=on_device(rows, self._device),
            is_padding_mTT=None if min(lengths) == longest else padding_mT[:, :, None] | padding_mT[:, None, :],
        )


def lookup_norm2(segments: Segments, ids_S: Tensor, grad_SD: Tensor, num_ids: int) -> Tensor:
    """Squared norm of each segment's gradient of an embedding: rows of one id add up before they are squared. [n]

    Without `unique`, whose result's size the host would have to wait for. float64

    >>> segments = Segments((0, 2, 3), torch.device("cpu"))
    >>> lookup_norm2(segments, torch.tensor([5, 5, 5]), torch.ones(3, 1), 8).tolist()
    [4.0, 1.0]
    """
    key_S, order_S = (segments.segment_S * num_ids + ids_S).sort()  # segments stay in their order
    is_first_S = torch.ones_like(key_S, dtype=torch.bool)
    is_first_S[1:] = key_S[1:] != key_S[:-1]
    slot_S = is_first_S.cumsum(0) - 1  # where the rows of one id and segment add up
    sum_SD = torch.zeros_like(grad_SD, dtype=torch.float32).index_add_(0, slot_S, grad_SD[order_S].float())
    return segments.sums(row_squared_norms(sum_SD)[slot_S] * is_first_S)


def on_device(values: Sequence[object], device: torch.device) -> Tensor:
    """A tensor of numbers, without waiting for what the device computes."""
    tensor = torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
