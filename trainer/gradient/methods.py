"""How a step's gradient is made and given to DeepSpeed: the protocol that `Learner` uses, and the method by sums.

A method owns everything between the batch's groups and DeepSpeed's gradients. The learner decides only whether the step
is made. Independent of learning rates, batches and metrics.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from agentrl.config import Config
from agentrl.types import TrajectoryGroup
from trainer import ranks
from trainer.gradient import handoff
from trainer.gradient.norms import total_norm
from trainer.gradient.step_gradient import Estimator
from trainer.gradient.step_members import ReferenceLogprobs, StepMembers
from trainer.packing import share_of_rank
from trainer.step_stats import GroupStats

log = logging.getLogger(__name__)


def own_share(groups: Sequence[TrajectoryGroup], *, loads: list[int] | None = None) -> list[TrajectoryGroup]:
    """The groups of this rank, where whole groups are dealt out. `loads`: see `share_of_rank`."""
    return share_of_rank(groups, rank=ranks.data_index(), num_ranks=ranks.data_count(), loads=loads)


def step_members(model: Any, config: Config, reference: ReferenceLogprobs | None) -> StepMembers:
    """What every method shares, for this process's ranks."""
    return StepMembers(
        model,
        config.algorithm,
        pack_tokens=config.learner.pack_tokens,
        gather=ranks.gather_data,
        annotates=config.metrics.annotates_tokens,
        reference=reference,
    )


def overflow(gradients: Iterable[Tensor]) -> list[str]:
    """Why a step with these gradients must be refused; empty where they are finite."""
    return [] if math.isfinite(float(total_norm(gradients))) else ["the summed gradient overflows"]


class GradientMethod(Protocol):
    """One way to a step's gradient. Every rank makes the same calls, in this order.

    Example::

        stats = method.estimate(groups, policy_version=3, num_episodes=64)
        if any rank's method.non_finite():
            method.discard()
        else:
            method.hand_over()
            engine.step()
    """

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters."""
        ...

    def estimate(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        policy_version: int,
        num_episodes: int,
        is_first: bool = True,
        is_last: bool = True,
    ) -> list[GroupStats]:
        """Make this rank's share of the gradient of the batch's groups, with B = `num_episodes`. One record per group.

        Every rank is given all groups and gets all records, in the same order. NaN and infinities raise nothing here.

        Args:
            num_episodes: of the whole batch.
            is_first: begin a new gradient. False: add to that of the last call. A batch may be given in parts, unless
                its objective looks at the whole of it (`Objective.needs_batch`).
            is_last: the batch is complete with these groups. False: a later call completes it.
        """
        ...

    def non_finite(self) -> list[str]:
        """Why the gradient just estimated must not be used, as far as this rank sees it; empty where it is finite."""
        ...

    def hand_over(self) -> None:
        """Leave the gradient in DeepSpeed, summed over ranks, so that `engine.step()` may follow."""
        ...

    def discard(self) -> None:
        """Drop the gradient in place of `hand_over`: weights, optimizer and the next step are as if there were none."""
        ...


class OnePass:
    """The method by sums: one recorded backward per pack into one or two float32 sums of the model's size.

    Norms are exact. Recorded modules only (trainer/gradient/recorded_modules.py).

    Example: see `GradientMethod`.
    """

    def __init__(self, model: Any, engine: Any, config: Config, reference: ReferenceLogprobs | None = None) -> None:
        self._engine = engine
        self._estimator = Estimator(
            model,
            config.algorithm,
            pack_tokens=config.learner.pack_tokens,
            gather=ranks.gather_data,
            annotates=config.metrics.annotates_tokens,
            reference=reference,
        )
        self._loads: list[int] = []  # tokens that each rank was given of this batch
        self._log_cost_of_exact_norms(config)

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters."""
        return self._estimator.parameters

    def estimate(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        policy_version: int,
        num_episodes: int,
        is_first: bool = True,
        is_last: bool = True,
    ) -> list[GroupStats]:
        """Leave the gradient of this rank's groups in the estimator's sums."""
        self._loads = [0] * ranks.data_count() if is_first else self._loads
        stats = self._estimator.estimate(
            own_share(groups, loads=self._loads),
            policy_version=policy_version,
            num_episodes=num_episodes,
            is_first=is_first,
            is_last=is_last,
        )
        return ranks.gather_data(stats, GroupStats)

    def non_finite(self) -> list[str]:
        """Whether this rank's sum overflows."""
        return overflow(self._estimator.sums.total)

    def hand_over(self) -> None:
        """Give every parameter's sum away inside DeepSpeed's own backward."""
        handoff.hand_over(self._engine, self._estimator.sums, factor=-float(ranks.count()))

    def discard(self) -> None:
        """The next step's sums start with zeros."""
        handoff.discard(self._engine)

    def _log_cost_of_exact_norms(self, config: Config) -> None:
        """If memory is short enough to divide or offload weights: the sums are whole on every rank in any stage."""
        settings, sums = config.learner, self._estimator.sums
        if sums.has_scores and (settings.zero_stage == 3 or settings.offload_optimizer):
            sum_bytes = 4 * sum(ranks.whole_shape(weight).numel() for weight in sums.parameters)
            log.info(
                "exact norms: every rank holds two float32 sums of %.3g GB each while it estimates a gradient; "
                "learner.gradient=one_pass_sharded divides them among ranks, two_pass keeps none",
                sum_bytes / 1e9,
            )
