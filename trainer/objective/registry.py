"""Finds the objective that a config names: one of ours, or a class of the user's. Independent of models."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.env.registry import load_object
from agentrl.errors import ConfigError
from trainer.objective import trial
from trainer.objective.imitation import Distillation, Imitation
from trainer.objective.interface import Objective
from trainer.objective.policy_gradient import PolicyGradient
from trainer.objective.turn_credit import TurnCredit

OBJECTIVES: Mapping[str, type[Objective]] = {
    "policy_gradient": PolicyGradient,
    "distillation": Distillation,
    "imitation": Imitation,
}
"""Name in `algorithm.objective` -> class. The names and a line on each are in agentrl/config/algorithm.py."""


def make_objective(algorithm: AlgorithmConfig) -> Objective:
    """The objective of `algorithm.objective`, with `algorithm.objective_kwargs`. Raises ConfigError, which says why.

    >>> type(make_objective(AlgorithmConfig(preset="grpo"))).__name__
    'PolicyGradient'
    """
    kind = TurnCredit if algorithm.credit == "turn" else _load(algorithm.objective)
    try:
        objective = kind(algorithm, **algorithm.objective_kwargs)
    except TypeError as error:
        raise ConfigError(
            f"algorithm.objective={algorithm.objective}: cannot make {kind.__name__}: {error}; it gets the section "
            "`algorithm`, and algorithm.objective_kwargs as keyword arguments"
        ) from error
    if algorithm.objective not in OBJECTIVES:
        trial.check(objective)
    return objective


def _load(name: str) -> type[Objective]:
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    try:
        found = load_object(name)
    except ConfigError as error:
        raise ConfigError(f"algorithm.objective={name}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ConfigError(
            f"algorithm.objective={name} is not an Objective: derive it, `class {name.rpartition(':')[2]}(Objective):` "
            "with `from trainer.objective import Objective`"
        )
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"algorithm.objective={name} does not define {', '.join(missing)}")
    return found
