"""By which methods a learner can make its gradient: `learner.gradient`, or under `auto` what the objective allows.

Independent of how the methods work. Where `auto` allows several, trainer/plan/choice.py takes the first that fits.
"""

from __future__ import annotations

from typing import Any

from agentrl.config import Config
from agentrl.config.learner import GradientMethod as MethodName
from agentrl.config.learner import method_refusal
from agentrl.errors import ConfigError
from trainer.gradient.methods import GradientMethod, OnePass
from trainer.gradient.plain import Plain
from trainer.gradient.spread_methods import OnePassSharded, TwoPass
from trainer.gradient.step_members import ReferenceLogprobs
from trainer.objective.registry import make_objective


def make_method(
    method: MethodName, model: Any, engine: Any, config: Config, reference: ReferenceLogprobs | None = None
) -> GradientMethod:
    """The method of this name, one of `possible(config)`.

    Example: `make_method("plain", model, start_engine(model, config), config).estimate(groups, ...)`.
    """
    match method:
        case "plain":
            return Plain(model, engine, config, reference)
        case "one_pass_sharded":
            return OnePassSharded(model, engine, config, reference)
        case "two_pass":
            return TwoPass(model, engine, config, reference)
        case _:
            return OnePass(model, engine, config, reference)


def is_recorded(config: Config) -> bool:
    """Whether this run makes gradients by trajectory: for its method, or to compare baselines at times."""
    return "plain" not in possible(config) or config.algorithm.variance_every > 0


def possible(config: Config) -> tuple[MethodName, ...]:
    """The methods that may make the gradient, the fastest first. Raises ConfigError where none can.

    More than one only under `learner.gradient: auto` with exact norms.
    """
    method, objective = config.learner.gradient, make_objective(config.algorithm)
    is_exact, is_divided = config.algorithm.baseline_norms == "exact", config.learner.sequence_parallel > 1
    if method != "auto":
        reason = method_refusal(
            method,
            has_norms=objective.needs_norms,
            is_exact=is_exact,
            needs_norms_first=objective.needs_norms_first,
            is_divided=is_divided,
        )
        if reason:
            raise ConfigError(reason)
        return (method,)
    if not objective.needs_norms:
        return ("plain",)
    if objective.needs_norms_first or not is_exact or is_divided:
        return ("two_pass",)
    return ("one_pass", "one_pass_sharded", "two_pass") if config.learner.num_ranks > 1 else ("one_pass", "two_pass")
