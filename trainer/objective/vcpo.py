"""The two parts of VCPO (Huang et al., "Stable Asynchrony", arXiv 2602.17616): ESS-scaled step, optimal baseline.

Pure but for `RhoBase`, which remembers the first steps. Knows nothing of models or of how gradients are made.
Everything is computed from log weights by subtracting the largest, so nothing overflows and no epsilon is needed.
Shapes: _B trajectories of the step (all ranks), _G members of one group. float64.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from agentrl.config.presets import StepScale

log = logging.getLogger(__name__)

_EXPONENT: dict[StepScale, float] = {"ess_sqrt": 0.5, "ess_linear": 1.0, "none": 0.0}

NUM_ON_POLICY_STEPS = 5
NUM_FIRST_STEPS = 10


def ess_ratio(log_weight_B: Tensor) -> Tensor:
    """rho = ESS / B = (sum w)^2 / (B * sum w^2) with w = exp(log_weight): arXiv 2602.17616, section 4.1.

    In [1/B, 1]; unchanged when a constant is added to all log weights. Raises ValueError for NaN, infinities or B = 0:
    a rate scaled by NaN would be the full rate.
    """
    if len(log_weight_B) == 0 or not bool(torch.isfinite(log_weight_B).all()):
        raise ValueError("the effective sample size needs at least one log weight, all finite")
    weight_B = (log_weight_B.double() - log_weight_B.double().max()).exp()
    rho = weight_B.sum().square() / (len(weight_B) * weight_B.square().sum())
    return rho.clamp(1 / len(weight_B), 1.0)


def step_scale(rho: float, rho_base: float, kind: StepScale) -> float:
    """min(1, rho / rho_base)^p: p = 1/2 for AdamW-like optimizers, 1 for SGD-like (arXiv 2602.17616, section 4.1)."""
    if not (math.isfinite(rho) and math.isfinite(rho_base) and rho_base > 0):
        raise ValueError(f"rho={rho}, rho_base={rho_base}: both must be finite, rho_base positive")
    return float(min(1.0, rho / rho_base) ** _EXPONENT[kind])


def optimal_baseline(log_weight_G: Tensor, score_norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """b* = sum w^2 n^2 R / sum w^2 n^2, the constant of least gradient variance (arXiv 2602.17616, section 4.2).

    Args:
        log_weight_G: log of the weights *that the estimator uses*: with truncation, the truncated ones. The minimiser
            is then that of the estimator at hand. The paper has untruncated weights here and truncated ones in the
            gradient: the same while none is cut, and its formula letter for letter when given those.
        score_norm_G: norm of each member's own score, before any weight, normalised by length if the loss is.
        reward_G: R.

    Returns a scalar within [min R, max R], or None when no member has a gradient.
    """
    log_share_G = 2 * (log_weight_G.double() + score_norm_G.double().log())
    if not bool((log_share_G > -math.inf).any()):
        return None
    reward_G = reward_G.double()
    return (torch.softmax(log_share_G, dim=0) * reward_G).sum().clamp(reward_G.min(), reward_G.max())


def safe_baseline(log_weight_G: Tensor, score_norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """min(b*, mean R): the optimal baseline, but never above the group's mean (not in the paper).

    Where one successful trajectory owns w^2 n^2, b* runs to its reward and every other member of the group is pushed
    down at once. Arguments and answer are those of `optimal_baseline`.
    """
    optimum = optimal_baseline(log_weight_G, score_norm_G, reward_G)
    return None if optimum is None else torch.minimum(optimum, reward_G.double().mean())


class RhoBase:
    """The ESS ratio at which the full learning rate is used: given, or learned from the first steps and then fixed.

    Learned: the median over the first 5 steps without any lag, or over the first 10 steps when lag comes before that.
    Until it is settled, the median of what was seen so far.
    """

    def __init__(self, setting: float | Literal["auto"]) -> None:
        self._fixed = None if setting == "auto" else float(setting)
        self._seen: list[tuple[float, int]] = []

    def observe(self, rho: float, *, max_lag: int) -> float:
        """The base to use for a step that measured `rho` and whose oldest trajectory was `max_lag` versions old."""
        if self._fixed is not None:
            return self._fixed
        self._seen.append((rho, max_lag))
        on_policy = [rho for rho, lag in self._seen if lag == 0]
        if len(on_policy) >= NUM_ON_POLICY_STEPS:
            self._settle(on_policy, "steps without lag")
        elif len(self._seen) >= NUM_FIRST_STEPS:
            self._settle([rho for rho, _ in self._seen], "first steps")
        return self._fixed or statistics.median(rho for rho, _ in self._seen)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold, as plain numbers."""
        return {"fixed": self._fixed, "seen": [list(entry) for entry in self._seen]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. The config wins: a number that it gives is kept, `auto` takes no number
        that another config gave.
        """
        seen = [(float(rho), int(lag)) for rho, lag in state["seen"]]
        if self._fixed is None and seen:
            self._fixed, self._seen = state["fixed"], seen
        now = f"being learned, {len(self._seen)} steps seen" if self._fixed is None else f"{self._fixed:.3f}"
        log.info("rho_base is %s", now)

    def _settle(self, rhos: Sequence[float], what: str) -> None:
        self._fixed = statistics.median(rhos)
        log.info("rho_base is settled at %.3f, the median of %d %s", self._fixed, len(rhos), what)
