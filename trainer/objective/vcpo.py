"""The two parts of VCPO (Huang et al., "Stable Asynchrony", arXiv 2602.17616): ESS-scaled step, optimal baseline.

Pure, except that `RhoBase` remembers the first steps. Independent of models and of how gradients are made. The largest
log weight is subtracted before any exponential, so nothing overflows and no epsilon is needed.
Shapes: _B trajectories of the step (all ranks), _G members of one group. float64.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from agentrl.config.presets import StepScale
from trainer.objective import baselines

log = logging.getLogger(__name__)

_EXPONENT: dict[StepScale, float] = {"ess_sqrt": 0.5, "ess_linear": 1.0, "none": 0.0}

NUM_ON_POLICY_STEPS = 5
LOW_RHO_BASE = 0.5
"""Below this a learned base is a warning."""


def ess_ratio(log_weight_B: Tensor) -> Tensor:
    """rho = ESS / B = (sum w)^2 / (B * sum w^2) with w = exp(log_weight): arXiv 2602.17616, section 4.1.

    A scalar in [1/B, 1], unchanged when a constant is added to all log weights. Raises ValueError for NaN, infinities
    or B = 0: min(1, NaN) would give the full learning rate.

    >>> round(float(ess_ratio(torch.tensor([0.0, 3.0]).log1p())), 2)  # weights 1 and 4: 25 / (2 * 17)
    0.74
    """
    if len(log_weight_B) == 0 or not bool(torch.isfinite(log_weight_B).all()):
        raise ValueError("the effective sample size needs at least one log weight, all finite")
    weight_B = (log_weight_B.double() - log_weight_B.double().max()).exp()
    rho = weight_B.sum().square() / (len(weight_B) * weight_B.square().sum())
    return rho.clamp(1 / len(weight_B), 1.0)


def step_scale(rho: float, rho_base: float, kind: StepScale) -> float:
    """min(1, rho / rho_base)^p, the factor of the learning rate (arXiv 2602.17616, section 4.1).

    p = 1/2 (`ess_sqrt`) suits AdamW-like optimizers, 1 (`ess_linear`) SGD-like ones. Raises ValueError for NaN.

    >>> step_scale(0.25, 1.0, "ess_sqrt")
    0.5
    """
    if not (math.isfinite(rho) and math.isfinite(rho_base) and rho_base > 0):
        raise ValueError(f"rho={rho}, rho_base={rho_base}: both must be finite, rho_base positive")
    return float(min(1.0, rho / rho_base) ** _EXPONENT[kind])


def optimal_baseline(log_weight_G: Tensor, score_norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """b* = sum w^2 n^2 R / sum w^2 n^2, the constant of least gradient variance (arXiv 2602.17616, section 4.2).

    Args:
        log_weight_G: log w. With the weights that the estimator uses (truncated ones under truncation) b* minimizes
            that estimator's variance. The paper's formula takes untruncated weights here and truncated ones in the
            gradient; both agree while no weight is truncated.
        score_norm_G: n, the norm of each member's score before any weight, length-normalized if the loss is.
        reward_G: R.

    Returns a scalar within [min R, max R], or None when no member has a gradient.

    >>> weight, norm, reward = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0]), torch.tensor([1.0, 0.0])
    >>> round(float(optimal_baseline(weight.log(), norm, reward)), 3)  # 1*9*1 / (1*9 + 4*1)
    0.692
    """
    log_share_G = 2 * (log_weight_G.double() + score_norm_G.double().log())
    if not bool((log_share_G > -math.inf).any()):
        return None
    reward_G = reward_G.double()
    return (torch.softmax(log_share_G, dim=0) * reward_G).sum().clamp(reward_G.min(), reward_G.max())


def safe_baseline(log_weight_G: Tensor, score_norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """min(b*, mean R): the optimal baseline, but never above the group's mean (not in the paper).

    Where one successful trajectory dominates w^2 n^2, b* approaches its reward and every other member of the group is
    made less likely at once. Arguments and result are those of `optimal_baseline`.
    """
    optimum = optimal_baseline(log_weight_G, score_norm_G, reward_G)
    return None if optimum is None else torch.minimum(optimum, reward_G.double().mean())


def leave_one_out_baseline(log_weight_G: Tensor, score_norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """b*_i = sum_{j != i} w_j^2 n_j^2 R_j / sum_{j != i} w_j^2 n_j^2, b* of the *other* members. [G] (not in the paper)

    It does not depend on the member from whose reward it is subtracted, so the expected gradient stays what it is
    without a baseline (where no weight is truncated); `optimal_baseline` is fitted to that member too. Where no other
    member has a gradient it is the mean of the others' rewards. Arguments are those of `optimal_baseline`.

    Returns None when no member has a gradient. Raises ValueError for a single member.

    >>> weight, norm, reward = torch.ones(3), torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 0.0, 0.5])
    >>> [round(float(b), 3) for b in leave_one_out_baseline(weight.log(), norm, reward)]  # 2 / 5, 11 / 13, 9 / 10
    [0.4, 0.846, 0.9]
    """
    if len(reward_G) < 2:
        raise ValueError("leave-one-out needs at least two members")
    log_share_G = 2 * (log_weight_G.double() + score_norm_G.double().log())
    if not bool((log_share_G > -math.inf).any()):
        return None
    reward_G = reward_G.double()
    is_own_GG = torch.eye(len(reward_G), dtype=torch.bool, device=reward_G.device)
    log_share_GG = log_share_G.expand(len(reward_G), -1).masked_fill(is_own_GG, -math.inf)
    has_share_G = (log_share_GG > -math.inf).any(dim=1)
    share_GG = torch.softmax(torch.where(has_share_G[:, None], log_share_GG, 0.0), dim=1)
    return torch.where(has_share_G, share_GG @ reward_G, baselines.leave_one_out(reward_G))


def safe_leave_one_out_baseline(log_weight_G: Tensor, score_norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """min(b*_i, mean of the others' rewards), both of the *other* members. [G] (not in the paper)

    The cap of `safe_baseline` without its dependence on the member's own reward and norm (docs/baselines.md).
    Arguments and result are those of `leave_one_out_baseline`. Raises ValueError for a single member.

    >>> weight, norm, reward = torch.ones(3), torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 0.0, 0.5])
    >>> [round(float(b), 3) for b in safe_leave_one_out_baseline(weight.log(), norm, reward)]  # means .25, .75, .5
    [0.25, 0.75, 0.5]
    """
    optimum_G = leave_one_out_baseline(log_weight_G, score_norm_G, reward_G)
    return None if optimum_G is None else torch.minimum(optimum_G, baselines.leave_one_out(reward_G.double()))


class RhoBase:
    """The ESS ratio at which the full learning rate is used: given, or (`auto`) learned from the first steps.

    What is learned is the ESS ratio of data *without* lag, which rounding alone leaves below 1: the median over the
    first 5 steps in which it could be measured. Until then it is the median so far, and 1 before the first. Steps whose
    data is older teach nothing: their own ratio would make lag the normal case and give it the full rate.

    >>> base = RhoBase("auto")
    >>> [base.observe(rho) for rho in (None, 0.9, 0.7, None, 0.8)]
    [1.0, 0.9, 0.8, 0.8, 0.8]
    """

    def __init__(self, setting: float | Literal["auto"]) -> None:
        self._fixed = None if setting == "auto" else float(setting)
        self._on_policy: list[float] = []

    def observe(self, on_policy: float | None) -> float:
        """The base for a step whose data would have this ESS ratio if it had no lag (`diagnostics.on_policy_ratio`).

        None: it could not be measured.
        """
        if self._fixed is not None:
            return self._fixed
        if on_policy is not None:
            self._on_policy.append(on_policy)
        if not self._on_policy:
            return 1.0
        base = statistics.median(self._on_policy)
        if len(self._on_policy) == NUM_ON_POLICY_STEPS:
            self._fixed = base
            log.info("rho_base is settled at %.3f, the median of %d steps", base, NUM_ON_POLICY_STEPS)
            if base < LOW_RHO_BASE:
                log.warning(
                    "rho_base is %.3g: engine and learner differ so much that data without any lag has this ESS ratio. "
                    "Lag below it is not noticed; set model.dtype: float32, shorter answers, or algorithm.rho_base",
                    base,
                )
        return base

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores, as plain numbers."""
        return {"fixed": self._fixed, "on_policy": list(self._on_policy)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. The config has precedence: a number that it gives is kept, and `auto` does not
        take over a number that another config gave.
        """
        seen = [float(rho) for rho in state.get("on_policy", ())]
        if self._fixed is None and seen:
            self._fixed, self._on_policy = state["fixed"], seen
        so_far = f"being learned, from {len(self._on_policy)} of {NUM_ON_POLICY_STEPS} steps so far"
        now = so_far if self._fixed is None else f"{self._fixed:.3f}"
        log.info("rho_base is %s", now)
