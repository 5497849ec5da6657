"""One optimizer step from one batch: checks it, estimates the gradient, hands it to DeepSpeed, reports metrics.

Owns the model and the DeepSpeed engine. Independent of HTTP, weight transfer and how batches are made.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from agentrl.config import Config
from agentrl.config.learner import STREAMS_NO_WHOLE_BATCH
from agentrl.errors import ConfigError, LearnerError, StaleTrajectoryError
from agentrl.types import Batch, StepOutput, Trajectory
from trainer import diagnostics, packing, ranks, reference, startup_proof
from trainer.deepspeed_settings import set_rates, start_engine
from trainer.gradient.logprobs import score
from trainer.gradient.method_choice import is_recorded, make_method
from trainer.gradient.methods import own_share
from trainer.gradient.norms import total_norm
from trainer.model import keep_activations, load_model
from trainer.objective import make_objective, vcpo
from trainer.objective.reference_kl import coefficient
from trainer.plan.choice import choose
from trainer.schedules import rate_factor
from trainer.split_variance import SplitVariance
from trainer.step_stats import GroupStats

log = logging.getLogger(__name__)

MAX_BROKEN = 10
"""Steps in a row without a finite gradient after which the learner ends: it would not recover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """How one step changed the weights."""

    lr: float  # in use: after the schedule and lr_scale
    lr_scale: float  # from the ESS ratio
    rho_base: float
    grad_norm: float  # before clipping

    def metrics(self) -> dict[str, float]:
        return {f"learner/{name}": value for name, value in asdict(self).items()}


@dataclass(slots=True, kw_only=True)
class _Parts:
    """What was computed of a step's batch so far."""

    batches: list[Batch] = field(default_factory=list)
    stats: list[GroupStats] = field(default_factory=list)
    early_s: float = 0.0  # spent on all parts but the last

    def whole(self) -> Batch:
        """The batch, in the order of its groups."""
        groups = [group for batch in self.batches for group in batch.groups]
        if len(self.batches) > 1:  # parts come in the order in which their groups finished
            groups.sort(key=lambda group: group.group_id)
        return replace(self.batches[-1], groups=tuple(groups))


class Learner:
    """The policy and its optimizer. The entry point must have called `ranks.set_defaults`.

    Args:
        gpu_bytes: what its tensors may take of the GPU, for the choice of a gradient method; None: no limit.

    Raises ConfigError if `model.path` cannot be loaded, the architecture cannot be scored exactly, or
    `learner.stream_groups` is set with an objective that looks at the whole batch.

    Example::

        ranks.set_defaults(os.environ)
        learner = Learner(config)
        output = learner.step(batch)  # batch.policy_version == learner.policy_version
        output.metrics["learner/grad_norm"]
    """

    def __init__(self, config: Config, *, policy_version: int = 0, gpu_bytes: int | None = None) -> None:
        torch.manual_seed(config.seed)
        self.device = ranks.join(
            timeout_s=config.learner.step_timeout_s, sequence_parallel=config.learner.sequence_parallel
        )
        self.policy_version = policy_version
        self.config = config
        objective = make_objective(config.algorithm)  # a class of the user's is checked before the model is loaded
        if config.learner.stream_groups and objective.needs_batch:
            raise ConfigError(STREAMS_NO_WHOLE_BATCH)
        self.model = load_model(config).to(self.device)
        keep_activations(self.model, config.learner)
        startup_proof.prepare(self.model, is_recorded=is_recorded(config))
        self.engine = start_engine(self.model, config)
        """DeepSpeed's engine, which holds the weights and the optimizer."""
        frozen = reference.load(config, self.model)
        method = ranks.of_first(choose(config, gpu_bytes), str)
        reference_logprobs = None if frozen is None else frozen.logprobs
        self._method = make_method(method, self.model, self.engine, config, reference_logprobs)
        self._split_variance = SplitVariance(
            self.model,
            config.algorithm,
            pack_tokens=config.learner.pack_tokens,
            share=own_share,
            gather=ranks.gather_data,
            reduce=ranks.add_up,
            reference=reference_logprobs,
        )
        self._rho_base = vcpo.RhoBase(config.algorithm.rho_base)
        self._skipped_steps = 0
        self._broken_in_a_row = 0
        self._parts = _Parts()
        self.last_stats: list[GroupStats] = []
        """Of the groups of the last step."""

    def add(self, part: Batch) -> None:
        """Compute the gradient of some groups of the next batch, while the others are still played.

        Every rank calls it with the same part. The next `step` is given the rest, and makes one step of all groups.
        Raises as `step` does.
        """
        started_s = time.perf_counter()
        self._check(part)
        self._compute(part, is_last=False)
        self._parts.early_s += time.perf_counter() - started_s

    def drop_parts(self) -> None:
        """Forget what was added: there will be no step. Weights and optimizer have not changed."""
        if self._parts.batches:
            self._method.discard()
            self._parts = _Parts()

    def step(self, batch: Batch) -> StepOutput:
        """One optimizer step. Every rank calls it with the same batch and gets the same result.

        Groups that were given to `add` are not in `batch` again.

        A step is refused if its gradient contains a NaN or an infinity, or if its ESS ratio is below
        `algorithm.refuse_below`: weights and optimizer do not change, `learner/skipped_steps` counts it and the log
        names the trajectory. The policy version advances all the same, since rollouts wait for version v + 1; the
        weights of v + 1 then equal those of v.

        Raises:
            StaleTrajectoryError: a trajectory is older than the batch's max_lag.
            LearnerError: the batch is empty, for another version, lacks groups, has one twice, or contains tokens of a
                future version; or MAX_BROKEN steps in a row were refused for numbers that are not finite.
        """
        started_s = time.perf_counter()
        self._check(batch)
        batch, masked_share = self._masked(batch)
        self._compute(batch, is_last=True)
        parts, self._parts = self._parts, _Parts()
        batch, groups = parts.whole(), parts.stats
        self.last_stats = groups
        metrics = diagnostics.counts(groups) | diagnostics.policy(groups) | self._weight_metrics(groups)
        metrics |= self._penalty() | ({} if masked_share is None else {"learner/masked_share": masked_share})
        rho, update = _rho(groups), None
        broken = _refusals(groups) or ranks.gather(self._method.non_finite(), str)
        self._end_if_broken_for_good(broken)
        reasons = broken or _too_few(rho, self.config.algorithm.refuse_below) or _nothing_left(masked_share)
        if reasons or rho is None:
            self._skipped_steps += 1
            self._method.discard()
            log.warning("step %d refused, weights kept: %s", self.policy_version + 1, "; ".join(reasons[:5]))
        else:
            metrics |= self._measured_variance(batch)  # under the weights with which the batch was scored
            update = self._update(rho, on_policy=diagnostics.on_policy_ratio(groups))
            metrics |= update.metrics()
        grad_norm = None if update is None else update.grad_norm
        metrics |= diagnostics.breakdowns(groups, algorithm=self.config.algorithm, grad_norm=grad_norm)
        for alarm in self._alarms(groups, masked_share or 0.0):
            log.warning("step %d: %s", self.policy_version + 1, alarm)
        self.policy_version += 1
        step_s = time.perf_counter() - started_s + parts.early_s
        metrics |= {
            "learner/skipped_steps": float(self._skipped_steps),
            "learner/step_s": step_s,
            **({"learner/early_gradient_s": parts.early_s} if self.config.learner.stream_groups else {}),
            "learner/tokens_per_s": sum(one.num_tokens for one in diagnostics.members(groups)) / step_s,
        }
        self._log_step(groups, rho, update, step_s)
        parity = diagnostics.parity(groups)
        return StepOutput(
            policy_version=self.policy_version,
            metrics=metrics,
            ess_ratio=rho,
            skipped=update is None,
            parity_max_abs=None if parity is None else parity.max_abs,
            parity_mean_abs=None if parity is None else parity.mean_abs,
            parity_sigmas=diagnostics.parity_sigmas(groups),
        )

    def state_dict(self) -> dict[str, Any]:
        """The learner's state besides weights and optimizer, as plain numbers; trainer/checkpoint.py saves the rest."""
        return {
            "policy_version": self.policy_version,
            "skipped_steps": self._skipped_steps,
            "rho_base": self._rho_base.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, with the learning rate and the other settings of the config."""
        self.policy_version = int(state["policy_version"])
        self._skipped_steps = int(state["skipped_steps"])
        self._rho_base.load_state_dict(state["rho_base"])
        set_rates(self.engine, self.config)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token[t+1] | token[:t+1]) under the present weights, by the same code as in a step. [T-1].

        Raises LearnerError for broken weights.
        """
        if len(token_ids) < 2:
            return []
        text = packing.all_actions(torch.tensor(token_ids, device=self.device))
        result: list[float] = score(self.model, packing.join([text])).logprob_N.tolist()
        if not all(map(math.isfinite, result)):
            raise LearnerError(
                f"the weights of version {self.policy_version} are broken: their logprobs are NaN or infinite. "
                "They are not published. The last step was too large (learner.lr, learner.grad_clip, model.dtype)"
            )
        return result

    def _end_if_broken_for_good(self, reasons: Sequence[str]) -> None:
        self._broken_in_a_row = self._broken_in_a_row + 1 if reasons else 0
        if self._broken_in_a_row == MAX_BROKEN:
            raise LearnerError(
                f"{MAX_BROKEN} steps in a row were refused, the last for: {'; '.join(reasons[:3])}. The policy "
                "no longer learns: lower learner.lr, or look at these trajectories"
            )

    def _check(self, batch: Batch) -> None:
        if batch.policy_version != self.policy_version:
            raise LearnerError(f"batch is for version {batch.policy_version}, the learner is at {self.policy_version}")
        if not batch.trajectories():
            raise LearnerError(f"the batch of version {batch.policy_version} is empty")
        num_new = len(batch.groups) - batch.num_replayed
        for number, group in enumerate(batch.groups):
            for trajectory in group.trajectories:
                if trajectory.num_action_tokens:
                    self._check_versions(trajectory, batch.max_lag if number < num_new else None)

    def _check_versions(self, trajectory: Trajectory, max_lag: int | None) -> None:
        lag = self.policy_version - trajectory.policy_version
        if max_lag is not None and lag > max_lag:
            raise StaleTrajectoryError(f"trajectory {trajectory.id} has lag {lag}, allowed is {max_lag}")
        newest = max(trajectory.policy_versions())
        if newest > self.policy_version:
            raise LearnerError(f"trajectory {trajectory.id} has tokens of the future version {newest}")

    def _masked(self, batch: Batch) -> tuple[Batch, float | None]:
        """The batch without tokens of older weights and their share, where they are to be left out."""
        if self.config.rollout.partial != "mask":
            return batch, None
        masked = packing.without_older_tokens(batch)
        num_all, num_left = (sum(one.num_action_tokens for one in b.trajectories()) for b in (batch, masked))
        return masked, 1 - num_left / num_all if num_all else 0.0

    def _compute(self, batch: Batch, *, is_last: bool) -> None:
        """Add these groups to the gradient that the method holds. `is_last`: the batch is complete with them."""
        if is_last and batch.num_missing:
            raise LearnerError(
                f"{batch.num_missing} groups of the batch of version {self.policy_version} are missing: give its parts "
                "to Learner.add, and only the last one to Learner.step"
            )
        is_first, rollout = not self._parts.batches, self.config.rollout
        has_parts = not (is_first and is_last)
        stats = self._method.estimate(
            batch.groups,
            policy_version=self.policy_version,
            num_episodes=rollout.groups_per_step * rollout.group_size if has_parts else batch.num_episodes,
            is_first=is_first,
            is_last=is_last,
        )
        self._parts.batches.append(batch)
        self._parts.stats += stats
        if is_last and has_parts:
            self._check_parts()

    def _check_parts(self) -> None:
        """Raises LearnerError unless the parts are a batch as it was expected when the first one was computed."""
        whole, rollout = self._parts.whole(), self.config.rollout
        num_groups, num_episodes = len({group.group_id for group in whole.groups}), whole.num_episodes
        if num_groups != rollout.groups_per_step or num_episodes != num_groups * rollout.group_size:
            raise LearnerError(
                f"the parts of the batch of version {self.policy_version} have {num_groups} different groups with "
                f"{num_episodes} episodes, and not rollout.groups_per_step={rollout.groups_per_step} groups of "
                f"rollout.group_size={rollout.group_size}: give Learner.add and Learner.step each group once, or the "
                "whole batch to Learner.step"
            )

    def _weight_metrics(self, groups: list[GroupStats]) -> dict[str, float]:
        algorithm = self.config.algorithm
        return diagnostics.weights(
            groups, max_weight=algorithm.max_weight if algorithm.treatment == "truncate" else None
        )

    def _alarms(self, groups: list[GroupStats], masked_share: float) -> list[str]:
        """Where groups are replayed, which may have any lag, the mean weight of the others counts."""
        rollout = self.config.rollout
        fresh = diagnostics.mean_weight(groups, max_lag=rollout.lag_bound if rollout.replay else None)
        spans_steps = rollout.oversample > 1 and rollout.partial != "restart"
        fresher = "rollout.max_lag" if rollout.max_lag else "rollout.oversample" if spans_steps else None
        lower = f"{fresher} or learner.lr" if fresher else "learner.lr"
        spurious_share = diagnostics.spurious_share(groups)
        return diagnostics.alarms(fresh, spurious_share, masked_share=masked_share, lower=lower)

    def _penalty(self) -> dict[str, float]:
        algorithm = self.config.algorithm
        return {"learner/kl_beta": coefficient(algorithm, self.policy_version)} if algorithm.has_penalty else {}

    def _measured_variance(self, batch: Batch) -> dict[str, float]:
        every = self.config.algorithm.variance_every
        if not every or self.policy_version % every:
            return {}
        return self._split_variance.measure(batch.groups, policy_version=self.policy_version)

    def _update(self, rho: float, *, on_policy: float | None) -> _Update:
        """Hand the gradient to DeepSpeed and make the step at its scaled learning rate."""
        rho_base = self._rho_base.observe(on_policy)
        scale = vcpo.step_scale(rho, rho_base, self.config.algorithm.step_scale)
        self._method.hand_over()
        own_norm = self._reduced_norm() if self.engine.zero_optimization_stage() == 0 else 0.0
        rate = scale * rate_factor(self.policy_version, self.config.learner, num_steps=self.config.train.steps)
        with _scaled_rate(self.engine.optimizer.param_groups, rate):
            self.engine.step()
        return _Update(
            lr=self.config.learner.lr * rate,
            lr_scale=scale,
            rho_base=rho_base,
            grad_norm=float(self.engine.get_global_grad_norm() or own_norm),
        )

    def _log_step(self, groups: list[GroupStats], rho: float | None, update: _Update | None, step_s: float) -> None:
        """One line per step, on the first rank."""
        if not ranks.is_first():
            return
        parts = [] if rho is None else [f"ess_ratio {rho:.4g}"]
        if update is not None:
            parts += [f"lr_scale {update.lr_scale:.4g}", f"grad_norm {update.grad_norm:.4g}"]
        lag_max = max(member.lag for member in diagnostics.members(groups))
        log.info("step %d: %s", self.policy_version, ", ".join([*parts, f"lag_max {lag_max}", f"step_s {step_s:.4g}"]))

    def _reduced_norm(self) -> float:
        """Norm of the parameters' own gradients, which DeepSpeed reduces in stage 0 with float32, reporting no norm."""
        present = [parameter.grad for parameter in self._method.parameters if parameter.grad is not None]
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


def _refusals(groups: Sequence[GroupStats]) -> list[str]:
    return [
        f"trajectory {trajectory.id}: {', '.join(names)} not finite"
        for trajectory in diagnostics.members(groups)
        if (names := trajectory.non_finite())
    ]


def _rho(groups: Sequence[GroupStats]) -> float | None:
    """ESS ratio of the trajectories whose numbers are finite; None if there is none."""
    log_weights = [member.log_weight for member in diagnostics.members(groups) if not member.non_finite()]
    return float(vcpo.ess_ratio(torch.tensor(log_weights, dtype=torch.float64))) if log_weights else None


def _nothing_left(masked_share: float | None) -> list[str]:
    """The reason to refuse a step of which no token is trained; else empty."""
    if masked_share != 1.0:
        return []
    return ["older weights sampled every token of the batch (rollout.partial=mask): lower rollout.oversample"]


def _too_few(rho: float | None, refuse_below: float | None) -> list[str]:
    """The reason to refuse the step because a few trajectories have nearly all the weight; else empty."""
    if rho is None or refuse_below is None or rho >= refuse_below:
        return []
    return [f"ESS ratio {rho:.3g} is below algorithm.refuse_below={refuse_below:g}"]
