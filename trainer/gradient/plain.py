"""The plain method: one forward and one backward of DeepSpeed's own per pack, for objectives without exact norms.

Autograd makes the weights' gradients, DeepSpeed's hooks sum them over packs and ranks, divided as the ZeRO stage says:
no sum of the model's size exists beside them. So every architecture of transformers can be trained. Under bfloat16 a
pack's gradient has the weights' type; packs and ranks are added in float32 (trainer/deepspeed_settings.py).

Independent of recorders and sums. Shapes: _N action tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from agentrl.config import Config
from agentrl.types import TrajectoryGroup
from trainer import ranks
from trainer.gradient import handoff
from trainer.gradient.methods import overflow, own_share, step_members
from trainer.gradient.passes import Passes, Weigh, weighted
from trainer.gradient.scored import ScoredTrajectory
from trainer.gradient.step_members import ReferenceLogprobs
from trainer.gradient.sums import GradientSums
from trainer.step_stats import GroupStats


class PlainPasses(Passes):
    """Passes whose gradient DeepSpeed accumulates.

    Example::

        passes = PlainPasses(model, engine)
        passes.differentiate(members.evenly(packs), members.weigh, num_episodes=64)
        engine.step()
    """

    def __init__(self, model: Any, engine: Any) -> None:
        super().__init__(model, GradientSums([], has_scores=False))
        self._engine = engine

    def differentiate(
        self, packs: Sequence[Sequence[ScoredTrajectory]], weigh: Weigh, *, num_episodes: int, is_last: bool = True
    ) -> None:
        """Add to the step's gradient: every rank must give the same number of packs, at least one.

        Each pack is scored and its sum_i sum_t seed_it log pi_it differentiated. With `is_last` the last one completes
        the gradient.
        """
        for index, members in enumerate(packs):
            self._engine.set_gradient_accumulation_boundary(is_last and index == len(packs) - 1)
            scores = self._score(members, self._join(members), None, call=self._engine)
            for one in members:
                weigh(one)
            # DeepSpeed minimizes, and averages over ranks.
            self._engine.backward(-float(ranks.count()) * weighted(scores, members, num_episodes=num_episodes))


class Plain:
    """The plain method. Whole groups are dealt out over ranks.

    Weights that look at the whole batch take a forward pass over everything first.

    Example: see `GradientMethod`.
    """

    def __init__(self, model: Any, engine: Any, config: Config, reference: ReferenceLogprobs | None = None) -> None:
        self._engine = engine
        self._members = step_members(model, config, reference)
        self._passes = PlainPasses(model, engine)
        self._loads: list[int] = []  # tokens that each rank was given of this batch

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters."""
        return self._members.parameters

    def estimate(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        policy_version: int,
        num_episodes: int,
        is_first: bool = True,
        is_last: bool = True,
    ) -> list[GroupStats]:
        """Leave the gradient in DeepSpeed."""
        members = self._members
        self._loads = [0] * ranks.data_count() if is_first else self._loads
        scored = members.scored(own_share(groups, loads=self._loads), policy_version=policy_version)
        idle = [member for group in scored for member in group.idle]
        trained = [member for group in scored for member in group.trained]
        members.score_reference([*trained, *idle])
        packs = members.packed(trained)
        members.each(members.packed(idle), self._passes.forward_only)
        if members.objective.needs_batch:
            members.each(packs, self._passes.forward_only)
            members.weigh_all([*trained, *idle])
        self._passes.differentiate(members.evenly(packs), members.weigh, num_episodes=num_episodes, is_last=is_last)
        for member in idle:
            members.weigh(member)
        return ranks.gather_data(members.stats(scored, policy_version), GroupStats)

    def non_finite(self) -> list[str]:
        """Whether this rank's part of the summed gradient overflows."""
        return overflow(handoff.held_gradients(self._engine))

    def hand_over(self) -> None:
        """DeepSpeed has it already."""

    def discard(self) -> None:
        """Make DeepSpeed forget it."""
        handoff.discard(self._engine)
