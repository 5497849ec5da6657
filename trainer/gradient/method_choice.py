"""By which method a learner makes its gradient: `learner.gradient`, or what the objective needs where it is `auto`.

Independent of how the methods work.
"""

from __future__ import annotations

import logging
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

log = logging.getLogger(__name__)


def make_method(model: Any, engine: Any, config: Config, reference: ReferenceLogprobs | None = None) -> GradientMethod:
    """The method of `config`. Raises ConfigError where it cannot make the objective's gradient.

    Example: `make_method(model, start_engine(model, config), config).estimate(groups, ...)`.
    """
    method = chosen(config)
    log.info("learner.gradient: %s%s", method, " (auto)" if config.learner.gradient == "auto" else "")
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
    return chosen(config) != "plain" or config.algorithm.variance_every > 0


def chosen(config: Config) -> MethodName:
    """The method that `config` names, or the one that `auto` stands for. Raises ConfigError where it cannot work."""
    method, objective = config.learner.gradient, make_objective(config.algorithm)
    is_exact, is_divided = config.algorithm.baseline_norms == "exact", config.learner.sequence_parallel > 1
    if method == "auto":
        if not objective.needs_norms:
            return "plain"
        is_first = objective.needs_norms_first or not is_exact or is_divided
        return "two_pass" if is_first else "one_pass"
    reason = method_refusal(
        method,
        has_norms=objective.needs_norms,
        is_exact=is_exact,
        needs_norms_first=objective.needs_norms_first,
        is_divided=is_divided,
    )
    if reason:
        raise ConfigError(reason)
    return method
