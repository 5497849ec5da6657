"""The variance of the step's gradient under each baseline, measured by splitting the batch into halves.

With the gradients g_1 and g_2 of halves of n_1 and n_2 episodes, each the mean over its half,

    tr Cov(g)  is estimated by  |g_1 - g_2|^2 n_1 n_2 / (n_1 + n_2)^2        g = mean over both

without bias if groups are independent. Unlike `diagnostics.variance` it assumes nothing about episodes within a group.
One number from one split is noisy: read its average over steps. Independent of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.presets import OPTIMAL, Baseline, refusal
from agentrl.types import TrajectoryGroup
from trainer.gradient.norms import squared_norm
from trainer.gradient.step_gradient import Estimator
from trainer.gradient.step_members import ReferenceLogprobs

COMPARED: tuple[Baseline, ...] = (
    *("none", "mean", "leave_one_out", "length_weighted"),
    *("opob", "opob_safe", "opob_leave_one_out", "opob_safe_leave_one_out", "otb"),
)


def comparable(algorithm: AlgorithmConfig) -> list[AlgorithmConfig]:
    """The same settings with every baseline that they allow; by themselves where another class is the objective."""
    if algorithm.objective != "policy_gradient":
        return [algorithm]
    return [
        algorithm.model_copy(update={"baseline": name})
        for name in COMPARED
        if refusal(ratio=algorithm.ratio, treatment=algorithm.treatment, baseline=name) is None
        if algorithm.spurious is None or name not in OPTIMAL | {"otb"}
    ]


def halves(groups: Sequence[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
    """Every second group, and the others. Ranks that pass the same groups get the same halves."""
    return list(groups[0::2]), list(groups[1::2])


class SplitVariance:
    """Measures the variance on demand.

    While it measures it holds two float32 copies of the gradient, three with norms; otherwise none.

    Args:
        pack_tokens: budget of a pack.
        reference: scores packs under the frozen model, for objectives that need it.
        share: the groups of this rank.
        gather: collects a list over ranks.
        reduce: sums a tensor over ranks, in place.

    Example:
        metrics = split_variance.measure(batch.groups, policy_version=4)
        metrics["vitals/split_variance_opob"]
    """

    def __init__(
        self,
        model: Any,
        algorithm: AlgorithmConfig,
        *,
        pack_tokens: int,
        share: Callable[[Sequence[TrajectoryGroup]], list[TrajectoryGroup]],
        gather: Callable[[list[Any], Any], list[Any]],
        reduce: Callable[[Tensor], None],
        reference: ReferenceLogprobs | None = None,
    ) -> None:
        self._model = model
        self._algorithms = comparable(algorithm)
        self._pack_tokens = pack_tokens
        self._share, self._gather, self._reduce, self._reference = share, gather, reduce, reference

    def measure(self, groups: Sequence[TrajectoryGroup], *, policy_version: int) -> dict[str, float]:
        """`vitals/split_variance_BASELINE` for each baseline (`own` for a class of the user's).

        Empty with fewer than two groups.
        Every rank must call it with the same groups. Call it for batches with finite numbers only, since one NaN makes
        every result NaN. It costs about one step's passes per baseline and does not change the weights.
        """
        parts = halves(groups)
        num_1, num_2 = (_num_episodes(part) for part in parts)
        if not num_1 or not num_2:
            return {}
        factor = num_1 * num_2 / (num_1 + num_2) ** 2
        return {
            f"vitals/split_variance_{_name(rule)}": factor * self._squared_distance(parts, rule, policy_version)
            for rule in self._algorithms
        }

    def _squared_distance(
        self, parts: Sequence[list[TrajectoryGroup]], algorithm: AlgorithmConfig, policy_version: int
    ) -> float:
        """|g_1 - g_2|^2, over all ranks' shares."""
        estimator = Estimator(
            self._model, algorithm, pack_tokens=self._pack_tokens, gather=self._gather, reference=self._reference
        )
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


def _name(rule: AlgorithmConfig) -> str:
    """Its baseline; `own` where another class makes the objective."""
    return rule.baseline if rule.objective == "policy_gradient" else "own"


def _num_episodes(groups: Sequence[TrajectoryGroup]) -> int:
    return sum(len(group.episodes) for group in groups)
