"""The weights with which a pack's segments enter the sums, arranged so that segments of one weight make one product.

Segment i enters the total with ratio_i score_i and the scores with score_i. Its score is split,

    score_i = scale_i seed_i,    scale_i = 2^(-24 j),    2^-22 < seed_i <= 4

and seed_i multiplies the seed of the backward, so that every row of the segment's gradients has it already. Members of
equal reward then have one ratio, and one scale unless their weights are very different: all their rows make one
product. Scales keep the squares of small seeds far above float32's smallest number. Pure; independent of tensors and of
what weights mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

STEP, TOP = 24, 2
"""Powers of two between scales, and above 1 that a seed may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Segments that follow one another and have the same weight.

    Example: `SegmentWeights.of([0.6, 0.6], [1.0, 1.0]).runs` is a single one.
    """

    segments: range
    ratio: float  # of what the total gets to what the scores get
    scale: float  # of what the scores get


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentWeights:
    """One number of each kind for each segment.

    >>> weights = SegmentWeights.of([0.6, 0.6, -0.4], [1.0, 0.25, 0.5])
    >>> weights.seed_n
    (1.0, 0.25, 0.5)
    >>> [(list(run.segments), run.ratio, run.scale) for run in weights.runs]
    [([0, 1], 0.6, 1.0), ([2], -0.4, 1.0)]
    """

    ratio_n: tuple[float, ...]
    scale_n: tuple[float, ...]
    seed_n: tuple[float, ...]

    @classmethod
    def of(cls, ratio_n: Sequence[float], score_n: Sequence[float]) -> SegmentWeights:
        """From ratios and scores, all finite, scores not negative. A score of 0 has the scale 0 and the seed 1."""
        parts = [_parts(score) for score in score_n]
        return cls(
            ratio_n=tuple(ratio_n),
            scale_n=tuple(scale for scale, _ in parts),
            seed_n=tuple(seed for _, seed in parts),
        )

    @property
    def runs(self) -> list[Run]:
        """Segments of one weight that follow one another, in the order of segments."""
        weights = list(zip(self.ratio_n, self.scale_n, strict=True))
        return [
            Run(segments=range(members[0], members[-1] + 1), ratio=ratio, scale=scale)
            for (ratio, scale), found in groupby(range(len(weights)), key=weights.__getitem__)
            if (members := list(found))
        ]


def _parts(score: float) -> tuple[float, float]:
    """(scale, seed)."""
    if score <= 0:
        return 0.0, 1.0
    steps = math.floor((TOP - math.log2(score)) / STEP)
    return math.ldexp(1.0, -STEP * steps), math.ldexp(score, STEP * steps)
