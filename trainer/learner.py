"""One optimizer step from one batch: checks it, estimates the gradient, hands it to DeepSpeed, measures.

Owns the model and the DeepSpeed engine. Knows nothing of HTTP, of where weights go, or of how batches are made.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

from agentrl.config import Config
from agentrl.errors import LearnerError, StaleTrajectoryError
from agentrl.types import Batch, StepOutput, TrajectoryGroup
from trainer import diagnostics as vitals
from trainer import ranks
from trainer import startup_proof as self_test
from trainer.deepspeed_settings import set_rates, start_engine
from trainer.gradient import handoff as feed
from trainer.gradient.norms import total_norm
from trainer.gradient.score_sums import full_shape
from trainer.gradient.step_gradient import Estimator
from trainer.model import checkpoint_layers, load_model
from trainer.objective import vcpo
from trainer.packing import share_of_rank
from trainer.step_stats import GroupTerms
from trainer.variance import SplitVariance

log = logging.getLogger(__name__)

MAX_BROKEN = 10
"""Steps in a row that hold no finite gradient, before that is the learner's end: it would never learn again."""


class Learner:
    """The policy and its optimizer. `ranks.set_defaults` must have been called by the entry point.

    Raises ConfigError when `model.path` cannot be loaded or the architecture cannot be scored exactly.
    """

    def __init__(self, config: Config, *, policy_version: int = 0) -> None:
        torch.manual_seed(config.seed)
        self.device = ranks.join(timeout_s=config.learner.step_timeout_s)
        self.policy_version = policy_version
        self.config = config
        self.model = load_model(config).to(self.device)
        if config.learner.gradient_checkpointing:
            checkpoint_layers(self.model)
        self_test.prepare(self.model)
        self.engine = start_engine(self.model, config)
        """DeepSpeed's, which holds the weights and the optimizer."""
        self._estimator = Estimator(
            self.model, config.algorithm, pack_tokens=config.learner.pack_tokens, gather=ranks.gather
        )
        self._split_variance = SplitVariance(
            self.model,
            config.algorithm,
            pack_tokens=config.learner.pack_tokens,
            share=_own_share,
            gather=ranks.gather,
            reduce=ranks.add_up,
        )
        self._say_what_exactness_costs()
        self._rho_base = vcpo.RhoBase(config.algorithm.rho_base)
        self._skipped_steps = 0
        self._broken_in_a_row = 0

    def step(self, batch: Batch) -> StepOutput:
        """One optimizer step; every rank calls it with the same batch and gets the same answer.

        A step whose gradient holds a NaN or an infinity is refused: the weights and the optimizer stay as they are,
        `learner/skipped_steps` counts it and the log names the trajectory; so is one whose ESS ratio is below
        `algorithm.refuse_below`. The policy version advances all the same,
        so that whoever waits for version v + 1 gets it; the weights of v + 1 then equal those of v.

        Raises:
            StaleTrajectoryError: a trajectory is older than the batch's max_lag.
            LearnerError: the batch is empty, for another version, or holds tokens of a future version; or MAX_BROKEN
                steps in a row had to be refused for numbers that are not finite.
        """
        started_s = time.perf_counter()
        self._check(batch)
        groups = self._estimate(batch)
        metrics = vitals.counts(groups) | vitals.policy(groups) | self._weight_metrics(groups)
        rho = _rho(groups)
        broken = _refusals(groups) or ranks.gather(_overflow(self._estimator.sums.total), str)
        self._end_if_broken_for_good(broken)
        reasons = broken or _too_few(rho, self.config.algorithm.refuse_below)
        if reasons or rho is None:
            self._skipped_steps += 1
            feed.let_go(self.engine)
            log.warning("step %d refused, weights kept: %s", self.policy_version + 1, "; ".join(reasons[:5]))
        else:
            metrics |= self._measured_variance(batch)  # under the weights that the batch was scored with
            metrics |= self._update(rho, max_lag=max(member.lag for member in vitals.members(groups)))
        metrics |= vitals.signs(groups, algorithm=self.config.algorithm, grad_norm=metrics.get("learner/grad_norm"))
        for alarm in vitals.alarms(metrics):
            log.warning("step %d: %s", self.policy_version + 1, alarm)
        self.policy_version += 1
        step_s = time.perf_counter() - started_s
        metrics |= {
            "learner/skipped_steps": float(self._skipped_steps),
            "learner/step_s": step_s,
            "learner/tokens_per_s": metrics["learner/num_tokens"] / step_s,
        }
        return StepOutput(policy_version=self.policy_version, metrics=metrics, ess_ratio=rho)

    def state_dict(self) -> dict[str, Any]:
        """What the learner knows beside weights and optimizer, as plain numbers; trainer/checkpoint.py has the rest."""
        return {
            "policy_version": self.policy_version,
            "skipped_steps": self._skipped_steps,
            "rho_base": self._rho_base.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the config's own learning rate and what else it sets."""
        self.policy_version = int(state["policy_version"])
        self._skipped_steps = int(state["skipped_steps"])
        self._rho_base.load_state_dict(state["rho_base"])
        set_rates(self.engine, self.config)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token[t+1] | token[:t+1]) under the present weights. [T-1]. Raises LearnerError for broken weights."""
        ids_T = torch.tensor(token_ids, device=self.device)
        with torch.no_grad():
            logits_TV = self.model(input_ids=ids_T[None], use_cache=False).logits[0]
        log_p_TV = logits_TV[:-1].float().log_softmax(dim=-1)
        result: list[float] = log_p_TV.gather(1, ids_T[1:, None])[:, 0].tolist()
        if not all(map(math.isfinite, result)):
            raise LearnerError(
                f"the weights of version {self.policy_version} are broken: their logprobs are NaN or infinite. No "
                "engine gets them. The step before was too large (learner.lr, learner.grad_clip, model.dtype)"
            )
        return result

    def _end_if_broken_for_good(self, reasons: Sequence[str]) -> None:
        self._broken_in_a_row = self._broken_in_a_row + 1 if reasons else 0
        if self._broken_in_a_row == MAX_BROKEN:
            raise LearnerError(
                f"{MAX_BROKEN} steps in a row were refused, the last for: {'; '.join(reasons[:3])}. Nothing is learnt "
                "any more: lower learner.lr, or see which trajectories these are"
            )

    def _check(self, batch: Batch) -> None:
        if batch.policy_version != self.policy_version:
            raise LearnerError(f"batch is for version {batch.policy_version}, the learner is at {self.policy_version}")
        if not batch.trajectories():
            raise LearnerError(f"the batch of version {batch.policy_version} is empty")
        for trajectory in batch.trajectories():
            if trajectory.num_action_tokens == 0:
                continue
            lag = self.policy_version - trajectory.policy_version
            if lag > batch.max_lag:
                raise StaleTrajectoryError(f"trajectory {trajectory.id} has lag {lag}, allowed is {batch.max_lag}")
            newest = max(trajectory.policy_versions())
            if newest > self.policy_version:
                raise LearnerError(f"trajectory {trajectory.id} has tokens of the future version {newest}")

    def _estimate(self, batch: Batch) -> list[GroupTerms]:
        """Leave this rank's share of the gradient in the estimator's sums; return the terms of all ranks' groups."""
        return ranks.gather(
            self._estimator.estimate(
                _own_share(batch.groups),
                policy_version=self.policy_version,
                num_episodes=batch.num_episodes,
            ),
            GroupTerms,
        )

    def _say_what_exactness_costs(self) -> None:
        """Where memory was short enough to divide or offload: the sums are whole on every rank in any stage."""
        settings, sums = self.config.learner, self._estimator.sums
        if sums.has_scores and (settings.zero_stage == 3 or settings.offload_optimizer):
            sum_bytes = 4 * sum(full_shape(weight).numel() for weight in sums.parameters)
            log.info(
                "exact norms: every rank holds two float32 sums of %.3g GB each while it estimates a gradient; with "
                "algorithm.baseline_norms=proxy it is one",
                sum_bytes / 1e9,
            )

    def _weight_metrics(self, groups: list[GroupTerms]) -> dict[str, float]:
        algorithm = self.config.algorithm
        return vitals.weights(groups, max_weight=algorithm.max_weight if algorithm.treatment == "truncate" else None)

    def _measured_variance(self, batch: Batch) -> dict[str, float]:
        every = self.config.algorithm.variance_every
        if not every or self.policy_version % every:
            return {}
        return self._split_variance.measure(batch.groups, policy_version=self.policy_version)

    def _update(self, rho: float, *, max_lag: int) -> dict[str, float]:
        """Hand the gradient to DeepSpeed and step at this step's own learning rate."""
        rho_base = self._rho_base.observe(rho, max_lag=max_lag)
        scale = vcpo.step_scale(rho, rho_base, self.config.algorithm.step_scale)
        feed.hand_over(self.engine, self._estimator.sums, factor=-float(distributed.get_world_size()))
        own_norm = self._reduced_norm()
        with _scaled_rate(self.engine.optimizer.param_groups, scale):
            self.engine.step()
        return {
            "learner/lr": self.config.learner.lr * scale,
            "learner/lr_scale": scale,
            "learner/rho_base": rho_base,
            "learner/grad_norm": float(self.engine.get_global_grad_norm() or own_norm),
        }

    def _reduced_norm(self) -> float:
        """Norm of what lies on the parameters: in stage 0 with float32 DeepSpeed reduces there and reports no norm."""
        present = [parameter.grad for parameter in self._estimator.parameters if parameter.grad is not None]
        return float(total_norm(present))


@contextmanager
def _scaled_rate(param_groups: Sequence[dict[str, Any]], scale: float) -> Iterator[None]:
    """Multiply the learning rate for one step."""
    rates = [group["lr"] for group in param_groups]
    for group in param_groups:
        group["lr"] *= scale
    try:
        yield
    finally:
        for group, rate in zip(param_groups, rates, strict=True):
            group["lr"] = rate


def _own_share(groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    return share_of_rank(groups, rank=distributed.get_rank(), num_ranks=distributed.get_world_size())


def _refusals(groups: Sequence[GroupTerms]) -> list[str]:
    return [
        f"trajectory {trajectory.id}: {', '.join(names)} not finite"
        for trajectory in vitals.members(groups)
        if (names := trajectory.non_finite())
    ]


def _rho(groups: Sequence[GroupTerms]) -> float | None:
    """ESS ratio of the trajectories whose numbers are finite; None without any."""
    log_weights = [member.log_weight for member in vitals.members(groups) if not member.non_finite()]
    return float(vcpo.ess_ratio(torch.tensor(log_weights, dtype=torch.float64))) if log_weights else None


def _too_few(rho: float | None, refuse_below: float | None) -> list[str]:
    """Empty, or that too few trajectories carry the weight of all."""
    if rho is None or refuse_below is None or rho >= refuse_below:
        return []
    return [f"ESS ratio {rho:.3g} is below algorithm.refuse_below={refuse_below:g}"]


def _overflow(gradients: Sequence[Tensor]) -> list[str]:
    """Empty, or the reason why this rank's sum cannot be used."""
    return [] if math.isfinite(float(total_norm(gradients))) else ["the summed gradient overflows"]
