"""How far two records of the same tokens' logprobs are apart. Pure numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """|engine - learner| over a text, in nats."""

    max_abs: float
    mean_abs: float
    kl: float  # KL(engine || learner) a token, estimated on the text


def parity(engine: Sequence[float], learner: Sequence[float]) -> Parity:
    """Compare the logprobs of the same tokens. Both [T].

    The KL estimate is the mean of exp(d) - 1 - d, d = learner - engine (k3 of http://joschu.net/blog/kl-approx.html):
    unbiased where the tokens were sampled by the engine, and never negative. A NaN makes all numbers infinite.
    Raises ValueError when the lengths differ or there is nothing to compare.
    """
    if not engine or len(engine) != len(learner):
        raise ValueError(f"{len(engine)} and {len(learner)} logprobs cannot be compared")
    differences = [theirs - ours for ours, theirs in zip(engine, learner, strict=True)]
    if not all(map(math.isfinite, differences)):
        return Parity(max_abs=math.inf, mean_abs=math.inf, kl=math.inf)
    return Parity(
        max_abs=max(map(abs, differences)),
        mean_abs=math.fsum(map(abs, differences)) / len(differences),
        kl=math.fsum(_k3(difference) for difference in differences) / len(differences),
    )


def _k3(difference: float) -> float:
    return math.expm1(difference) - difference if difference < 700 else math.inf
