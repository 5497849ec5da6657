"""Statistics of a step's trajectories and groups: plain numbers that ranks exchange, the input of diagnostics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from agentrl.report.learner_notes import Annotation, TokenNotes

PARITY_BLOCK = 256
"""Tokens in a row whose log-ratios are summed: whole blocks only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryStats:
    """One trajectory of a step. Sums are over its action tokens. Made by `trainer.gradient.scored`.

    Example: `stats.non_finite()` names the numbers that refuse the step.
    """

    id: str
    episode: int  # index in its group of the episode that it is, or is a segment of
    reward: float
    log_weight: float  # untruncated
    weight: float  # in use, the mean over its tokens' weights; infinite where it would leave float32
    num_clipped: int  # weights that were truncated, masked or clipped
    num_weights: int  # how many weights it has: one, or one per action token
    advantage: float  # over the group's final baseline, divided by its deviation if so set; 0.0 without gradient
    score_norm: float  # of grad log pi, length-normalized if the loss is; 0.0 where it was not measured
    lag: int
    num_tokens: int
    num_action_tokens: int
    kl_sum: float
    entropy_sum: float
    reference_kl_sum: float | None  # log pi - log of the frozen model; None where it did not score
    num_parity_tokens: int  # action tokens sampled by the learner's present version
    parity_sum: float  # |learner - behaviour| logprob over those
    parity_max: float
    parity_kl_sum: float  # KL(engine || learner), estimated on those
    parity_square_sum: float  # (learner - behaviour)^2 over those
    parity_blocks: tuple[float, ...]  # sums of learner - behaviour over PARITY_BLOCK of those in a row
    num_silenced: int = 0  # action tokens left out because they are spurious
    baseline_share: float | None = None  # of its episode in the optimal baseline: w^2 n^2 / sum; None without one
    tokens: TokenNotes | None = None  # where metrics.annotate asks for them
    broken_parts: tuple[str, ...] = ()  # what the objective gave that is NaN or infinite, from finite rewards

    def non_finite(self) -> list[str]:
        """Names of the numbers that are NaN or infinite."""
        names = ("reward", "log_weight", "weight", "score_norm", "kl_sum", "entropy_sum")
        broken = [name for name in names if not math.isfinite(getattr(self, name))]
        if not math.isfinite(self.reference_kl_sum or 0.0):
            broken.append("reference_kl_sum")
        return [*broken, *self.broken_parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """One group: its members' statistics and its baseline.

    Example: `[len(episode) for episode in group.episodes()]` counts the segments of each episode.
    """

    trajectories: tuple[TrajectoryStats, ...]
    has_spread: bool
    has_gradient: bool
    baseline_minus_mean: float

    def annotations(self, *, is_refused: bool) -> Iterator[Annotation]:
        """What viewers are told of each trajectory. `is_refused`: the step was."""
        for one in self.trajectories:
            yield Annotation(
                id=one.id,
                log_weight=one.log_weight,
                weight=one.weight,
                num_clipped=one.num_clipped,
                advantage=one.advantage if self.has_gradient else None,
                score_norm=one.score_norm or None,
                baseline_share=one.baseline_share,
                baseline_minus_mean=self.baseline_minus_mean if self.has_gradient else None,
                is_refused=is_refused,
                tokens=one.tokens,
            )

    def episodes(self) -> list[list[TrajectoryStats]]:
        """The trajectories of each episode."""
        found: dict[int, list[TrajectoryStats]] = {}
        for trajectory in self.trajectories:
            found.setdefault(trajectory.episode, []).append(trajectory)
        return list(found.values())
