"""How much the step's gradient would scatter under each baseline, measured by splitting the batch into halves.

With the gradients g_1 and g_2 of halves of n_1 and n_2 episodes, each the mean over its half,

    tr Cov(g)  is estimated by  |g_1 - g_2|^2 n_1 n_2 / (n_1 + n_2)^2        g = mean over both

without bias where groups are independent: nothing is taken for granted of episodes within a group, unlike in
`vitals.variance`. One number from one split is noisy; its average over steps is what counts.
Knows nothing of DeepSpeed: `reduce` sums a tensor over ranks in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.presets import Baseline, refusal
from agentrl.types import TrajectoryGroup
from trainer.gradient.norms import squared_norm
from trainer.gradient.step_gradient import Estimator

COMPARED: tuple[Baseline, ...] = ("none", "mean", "leave_one_out", "length_weighted", "opob", "opob_safe", "otb")


def comparable(algorithm: AlgorithmConfig) -> list[AlgorithmConfig]:
    """The same settings under every baseline that they allow."""
    return [
        algorithm.model_copy(update={"baseline": name})
        for name in COMPARED
        if refusal(ratio=algorithm.ratio, treatment=algorithm.treatment, baseline=name) is None
    ]


def halves(groups: Sequence[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
    """Every second group, and the others: in the same order on every rank."""
    return list(groups[0::2]), list(groups[1::2])


class SplitVariance:
    """Measures on demand; holds memory only while it does: two float32 copies of the gradient, three with norms."""

    def __init__(
        self,
        model: Any,
        algorithm: AlgorithmConfig,
        *,
        pack_tokens: int,
        share: Callable[[Sequence[TrajectoryGroup]], list[TrajectoryGroup]],
        gather: Callable[[list[Any], Any], list[Any]],
        reduce: Callable[[Tensor], None],
    ) -> None:
        self._model = model
        self._algorithms = comparable(algorithm)
        self._pack_tokens = pack_tokens
        self._share, self._gather, self._reduce = share, gather, reduce

    def measure(self, groups: Sequence[TrajectoryGroup], *, policy_version: int) -> dict[str, float]:
        """`vitals/split_variance_BASELINE` for each; empty with fewer than two groups. All ranks call it alike.

        For batches whose numbers are finite: what is not would be all that one learns.

        Costs about one step's passes a baseline. The weights stay as they are.
        """
        parts = halves(groups)
        num_1, num_2 = (_num_episodes(part) for part in parts)
        if not num_1 or not num_2:
            return {}
        factor = num_1 * num_2 / (num_1 + num_2) ** 2
        return {
            f"vitals/split_variance_{rule.baseline}": factor * self._squared_distance(parts, rule, policy_version)
            for rule in self._algorithms
        }

    def _squared_distance(
        self, parts: Sequence[list[TrajectoryGroup]], algorithm: AlgorithmConfig, policy_version: int
    ) -> float:
        """|g_1 - g_2|^2 of all ranks' shares together."""
        estimator = Estimator(self._model, algorithm, pack_tokens=self._pack_tokens, gather=self._gather)
        first, second = (self._gradient(estimator, part, policy_version) for part in parts)
        total = 0.0
        for mine, other in zip(first, second, strict=True):
            difference = mine.sub_(other)
            self._reduce(difference)
            total += float(squared_norm(difference))
        return total

    def _gradient(self, estimator: Estimator, part: list[TrajectoryGroup], policy_version: int) -> list[Tensor]:
        estimator.estimate(self._share(part), policy_version=policy_version, num_episodes=_num_episodes(part))
        return [estimator.sums.take(index) for index in range(len(estimator.parameters))]


def _num_episodes(groups: Sequence[TrajectoryGroup]) -> int:
    return sum(len(group.episodes) for group in groups)
