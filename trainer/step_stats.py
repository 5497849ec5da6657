"""What a step's trajectories and groups come to, as numbers that travel between ranks. Knows no tensors of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryTerms:
    """What one trajectory contributes, as numbers. Sums are over its action tokens."""

    id: str
    episode: int  # which of its group it is, or is a segment of
    reward: float
    log_weight: float  # untruncated
    weight: float  # as the estimator uses it, of tokens' weights the mean; infinite when it would leave float32
    num_clipped: int  # weights that were cut, masked or clipped
    num_weights: int  # how many weights it has: one, or one an action token
    advantage: float  # about the group's final baseline, over its standard deviation if so set; 0.0 without a gradient
    score_norm: float  # of grad log pi as the loss uses it (length-normalised or not); 0.0 where none was needed
    lag: int
    num_tokens: int
    num_action_tokens: int
    kl_sum: float
    entropy_sum: float
    num_parity_tokens: int  # sampled by the learner's own version
    parity_sum: float  # |learner - behaviour| logprob over those
    parity_max: float
    parity_kl_sum: float  # KL(engine || learner), estimated on those

    def non_finite(self) -> list[str]:
        """Names of the numbers that are NaN or infinite."""
        names = ("reward", "log_weight", "weight", "score_norm", "kl_sum", "entropy_sum")
        return [name for name in names if not math.isfinite(getattr(self, name))]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerms:
    """One group's members and what its baseline came to."""

    trajectories: tuple[TrajectoryTerms, ...]
    has_spread: bool
    has_gradient: bool
    baseline_minus_mean: float

    def episodes(self) -> list[list[TrajectoryTerms]]:
        """The trajectories of each episode."""
        found: dict[int, list[TrajectoryTerms]] = {}
        for trajectory in self.trajectories:
            found.setdefault(trajectory.episode, []).append(trajectory)
        return list(found.values())
