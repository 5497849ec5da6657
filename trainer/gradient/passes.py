"""One pack through the model: scored alone, or scored and differentiated in one of three ways.

What a pass finds out is filled into the pack's runs. Knows weights and advantages as numbers, not where they come from.
Shapes: _N action tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agentrl.types import Trajectory
from trainer import packing
from trainer.gradient.logprobs import score
from trainer.gradient.score_gradients import recording, tied_weight
from trainer.gradient.score_sums import GradientSums, Recorder
from trainer.objective import baselines
from trainer.objective.policy_gradient import MemberWeights
from trainer.packing import ActionTensors, Pack

_NOTHING = torch.zeros(0, dtype=torch.float64)


@dataclass(slots=True, kw_only=True)
class Run:
    """One trajectory on its way through a step."""

    trajectory: Trajectory
    tensors: ActionTensors
    group_id: int
    index: int  # in its group
    advantage: float | None  # about the reference baseline; None: its group has no gradient
    score_scale: float  # 1/s
    length: float  # what its summed score is divided by: L / c
    log_ratio_N: Tensor = field(default_factory=lambda: _NOTHING)  # float64, log pi - log mu, on the CPU
    logit_norm2_N: Tensor = field(default_factory=lambda: _NOTHING)  # float64, see baselines.logit_norm2
    entropy_sum: float = 0.0
    weights: MemberWeights | None = None
    score_norm: float = 0.0  # of its score / length

    @property
    def used(self) -> MemberWeights:
        """The weights, which must have been found."""
        assert self.weights is not None, f"{self.trajectory.id} was not weighed"
        return self.weights

    @property
    def is_trained(self) -> bool:
        """Whether it has a part in the gradient, where its group has one."""
        return bool(self.tensors.num_actions) and self.trajectory.weight > 0

    @property
    def weight(self) -> float:
        """The weight in use; of tokens' weights the mean; 1 without any."""
        return float(self.used.weight_N.mean()) if self.tensors.num_actions else 1.0


class Passes:
    """Passes over packs of one model's runs, into one `GradientSums`. Every run must have an action token.

    An empty pack is a pass all the same, over a text of its own that leaves nothing behind: where ZeRO-3 divides
    weights among ranks, all of them must make the same passes.
    """

    def __init__(self, model: Any, sums: GradientSums) -> None:
        self._model = model
        self._sums = sums
        self._tied_weight = tied_weight(model)

    def scored(self, runs: Sequence[Run]) -> None:
        """Forward only."""
        pack = self._join(runs)
        self._score(runs, pack, None)

    def plain(self, runs: Sequence[Run], weigh: Callable[[Run], None], *, num_episodes: int) -> None:
        """Forward, then total += sum_i A_i / (B L_i) sum_t w_it score_it as one piece a weight."""
        pack = self._join(runs)
        recorder = self._recorder(pack, is_split=False, sums=self._sums if runs else None)
        with recording(self._model, recorder):
            logprob_N = self._score(runs, pack, recorder)
            seeds = []
            for run in runs:
                weigh(run)
                seed_N = run.used.weight_N * ((run.advantage or 0.0) / (run.length * num_episodes))
                seeds.append(seed_N if bool(seed_N.isfinite().all()) else torch.zeros_like(seed_N))
            _backward(logprob_N, seeds)

    def split(self, runs: Sequence[Run], weigh: Callable[[Run], None], *, num_episodes: int) -> None:
        """The same for one weight a trajectory, with its score norm, and scores += w_i / (s B L_i) score_i."""
        # Equal rewards side by side: see GradientSums.
        runs = sorted(runs, key=lambda run: run.advantage or 0.0)
        pack = self._join(runs)
        recorder = self._recorder(pack, is_split=True, sums=self._sums if runs else None)
        with recording(self._model, recorder):
            logprob_N = self._score(runs, pack, recorder)
            for segment, run in enumerate(runs):
                weigh(run)
                share = run.weight / num_episodes
                is_finite = math.isfinite(share)
                recorder.coefficient_n[segment] = share * (run.advantage or 0.0) if is_finite else 0.0
                recorder.score_n[segment] = share * run.score_scale if is_finite else 0.0
            _backward(logprob_N, _unit_seeds(runs))
        _keep_norms(runs, recorder)

    def proxies(self, runs: Sequence[Run]) -> None:
        """Forward, and a backward for the norms of the normalisation scales' scores alone."""
        pack = self._join(runs)
        recorder = self._recorder(pack, is_split=True, sums=None)
        with recording(self._model, recorder):
            logprob_N = self._score(runs, pack, recorder)
            _backward(logprob_N, _unit_seeds(runs))
        _keep_norms(runs, recorder)

    def _join(self, runs: Sequence[Run]) -> Pack:
        return packing.join([run.tensors for run in runs] or [self._dummy()])

    def _dummy(self) -> ActionTensors:
        ids = torch.zeros(2, dtype=torch.int64, device=self._model.device)
        return ActionTensors(
            input_ids_S=ids,
            predictor_N=ids[1:] + 1,
            target_N=ids[:1],
            behavior_logprob_N=torch.zeros(1, dtype=torch.float64),
            policy_version_N=torch.zeros(1, dtype=torch.int64),
        )

    def _recorder(self, pack: Pack, *, is_split: bool, sums: GradientSums | None) -> Recorder:
        return Recorder(
            sums,
            bounds=pack.bounds if is_split else (0, pack.bounds[-1]),
            action_bounds=pack.action_bounds if is_split else (0, pack.action_bounds[-1]),
            has_norms=is_split,
            tied_weight=self._tied_weight,
            device=pack.input_ids_S.device,
        )

    def _score(self, runs: Sequence[Run], pack: Pack, recorder: Recorder | None) -> Tensor:
        scores = score(self._model, pack, recorder)
        columns = (scores.logprob_N.detach(), scores.entropy_N, scores.sum_pi2_N)
        per_run = pack.per_segment(torch.stack(columns, dim=1).cpu().double())
        for run, scores_N3 in zip(runs, per_run, strict=False):
            logprob_N, entropy_N, sum_pi2_N = scores_N3.unbind(dim=1)
            run.log_ratio_N = logprob_N - run.tensors.behavior_logprob_N
            run.logit_norm2_N = baselines.logit_norm2(logprob_N, sum_pi2_N)
            run.entropy_sum = float(entropy_N.sum())
        return scores.logprob_N


def _unit_seeds(runs: Sequence[Run]) -> list[Tensor]:
    return [torch.full((run.tensors.num_actions,), 1 / run.length) for run in runs]


def _backward(logprob_N: Tensor, seeds: list[Tensor]) -> None:
    seed_N = torch.cat(seeds) if seeds else torch.zeros(len(logprob_N))
    torch.autograd.backward(logprob_N, seed_N.to(logprob_N))


def _keep_norms(runs: Sequence[Run], recorder: Recorder) -> None:
    for run, norm2 in zip(runs, recorder.norm2_n.tolist(), strict=False):
        # Rounding may leave a tiny negative square where a tied embedding's cross term cancels; NaN stays NaN.
        run.score_norm = 0.0 if norm2 < 0 else math.sqrt(norm2)
