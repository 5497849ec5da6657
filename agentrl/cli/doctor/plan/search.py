"""The setting nearest to a config that fits: tries changes of a few keys, the least intrusive first.

Independent of how a plan is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.cli.doctor.plan.cards import Card
from agentrl.cli.doctor.plan.planning import Plan, make_plan
from agentrl.cli.doctor.plan.records import LearnerNeeds
from agentrl.config import Config, parse
from agentrl.errors import ConfigError

BATCHES = (2, 12, 30, 80)
"""How many changes are asked for at once: the learner's half starts a process, and the first changes often suffice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Keys with their new values. Example: `str(Change(values={"learner.zero_stage": 3}, cost=1))`."""

    values: dict[str, Any]
    cost: int

    def __str__(self) -> str:
        return " ".join(f"{key}={_written(value)}" for key, value in self.values.items())

    def applied(self, config: Config) -> Config:
        """The changed config. Raises ConfigError where the result makes no sense."""
        tree = config.model_dump(mode="json")
        for key, value in self.values.items():
            section, name = key.split(".")
            tree[section][name] = value
        return parse(tree, source=str(self))


Ask = Callable[[Sequence[Config]], list[LearnerNeeds]]


def nearest(
    config: Config, cards: Sequence[Card], ask: Ask, *, mean_tokens: int | None = None
) -> tuple[Change, Plan] | None:
    """The cheapest change whose plan fits, and that plan; None where none of those tried does."""
    possible: list[tuple[Change, Config]] = []
    for change in changes(config, num_gpus=len(cards)):
        try:
            possible.append((change, change.applied(config)))
        except ConfigError:
            continue
    for size in BATCHES:
        tried, possible = possible[:size], possible[size:]
        needs = ask([changed for _, changed in tried]) if tried else []
        for (change, changed), learner in zip(tried, needs, strict=True):
            try:
                plan = make_plan(changed, learner, cards, mean_tokens=mean_tokens)
            except ConfigError:
                continue
            if plan.fits:
                return change, plan
    return None


def changes(config: Config, *, num_gpus: int) -> Iterator[Change]:
    """Combinations of single changes, in the order of their cost to the user."""
    knobs = [[Change(values={}, cost=0), *knob] for knob in _knobs(config, num_gpus)]
    combined = [
        Change(
            values={key: value for one in chosen for key, value in one.values.items()},
            cost=sum(one.cost for one in chosen),
        )
        for chosen in itertools.product(*knobs)
    ]
    yield from sorted((one for one in combined if one.values), key=lambda one: (one.cost, len(one.values)))


def _knobs(config: Config, num_gpus: int) -> Iterator[list[Change]]:
    """For each knob the values to try, with what they cost: 1 is a little time, 12 other weights to train."""
    learner, engine = config.learner, config.engine
    if not learner.gradient_checkpointing:
        yield [_set("learner.gradient_checkpointing", True, cost=1)]
    if learner.pack_tokens > config.rollout.max_context:
        yield [_set("learner.pack_tokens", config.rollout.max_context, cost=1)]
    stages = [stage for stage in (1, 2, 3) if stage > learner.zero_stage and (stage == 1 or learner.num_ranks > 1)]
    if stages:
        yield [_set("learner.zero_stage", stage, cost=stage) for stage in stages]
    yield [_set("engine.gpu_memory_fraction", value, cost=3) for value in (0.25, 0.2, 0.15, 0.4, 0.5)]
    if learner.gradient != "auto":
        yield [_set("learner.gradient", "auto", cost=1)]
    if not learner.offload_optimizer:
        yield [_set("learner.offload_optimizer", True, cost=6)]
    if config.model.lora is None:
        yield [_set("model.lora", {}, cost=12)]
    if learner.hostfile is None and not engine.urls and num_gpus > 1:
        yield list(_splits(config, num_gpus))


def _splits(config: Config, num_gpus: int) -> Iterator[Change]:
    """Other divisions of the machine's GPUs between ranks and engines; those of `eval.engines` stay."""
    width, num_spare = config.engine.tensor_parallel, config.eval.engines
    for ranks in range(num_gpus - width * (1 + num_spare), 0, -1):
        replicas = (num_gpus - ranks) // width - num_spare
        if (ranks, replicas) != (config.learner.num_ranks, config.engine.replicas):
            distance = abs(ranks - config.learner.num_ranks)
            values = {"learner.num_ranks": ranks, "engine.replicas": replicas, "engine.gpus": None}
            yield Change(values=values, cost=2 + distance)


def _set(key: str, value: Any, *, cost: int) -> Change:
    return Change(values={key: value}, cost=cost)


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
