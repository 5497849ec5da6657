"""What is compared: each arm is a config of the product, with a sentence about it.

The learner has one thread in every arm: on this model two make its step slower (0.47 s instead of 0.39 s).
Independent of how runs are made and measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Value = str | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train. Example: `ARMS["A4"].settings["rollout.max_lag"]` is 4."""

    name: str
    about: str
    settings: Mapping[str, Value] = field(default_factory=dict)
    """Keys of the config."""
    is_split: bool = False
    """Engine, sandbox and orchestrator have one core, the learner has the other."""
    is_drained: bool = False
    """New weights wait until the episodes in flight have ended."""

    @property
    def is_synchronous(self) -> bool:
        """Whether every trained token is of the weights that are trained."""
        return self.name.startswith("S")

    @property
    def replaces(self) -> bool:
        """Whether other groups replace those of equal rewards."""
        return "algorithm.keep_equal_rewards" not in self.settings


_KEEPS = {"algorithm.keep_equal_rewards": True}
_SYNC: Mapping[str, Value] = {"rollout.max_lag": 0}
_TAIL: Mapping[str, Value] = {"rollout.oversample": 1.5, "rollout.partial": "restart"}
"""1.5 made more steps an hour than 1.25 and 2 in the simulation (simulation.py)."""


def _synchronous() -> Iterable[Arm]:
    kinds = (
        ("S1", "synchronous, all cores in each phase", _SYNC, False),
        ("S2", "synchronous, one core for the learner and one for the rest", _SYNC, True),
        (
            "S3",
            "synchronous, the learner takes groups as they finish",
            {**_SYNC, "learner.stream_groups": True},
            False,
        ),
        (
            "S4",
            "synchronous, tail batching: the first groups of half as many more, the others later together",
            {**_SYNC, **_TAIL},
            False,
        ),
    )
    for name, about, settings, is_split in kinds:
        yield Arm(name=name, about=about, settings={**settings, **_KEEPS}, is_split=is_split)
        yield Arm(
            name=f"{name}r", about=f"{about}; equal rewards replaced in the step", settings=settings, is_split=is_split
        )


def _asynchronous() -> Iterable[Arm]:
    yield Arm(name="A1", about="one step off", settings={"rollout.max_lag": 1})
    for lag in (2, 4, 8):
        yield Arm(name=f"A{lag}", about=f"asynchronous, lag at most {lag}", settings={"rollout.max_lag": lag})
    yield Arm(
        name="P1",
        about="admission by AReaL's formula with 4, no age checked at consumption",
        settings={"rollout.max_lag": 4, "rollout.on_stale": "finish"},
    )
    yield Arm(
        name="P2",
        about="partial rollouts (APRIL): the first groups of twice as many, the others go on under the new weights",
        settings={**_SYNC, "rollout.oversample": 2.0, "rollout.on_stale": "finish"},
    )
    yield Arm(
        name="P2off",
        about="A4 without partial rollouts: new weights wait for the episodes in flight",
        settings={"rollout.max_lag": 4},
        is_drained=True,
    )


ARMS: Mapping[str, Arm] = {arm.name: arm for arm in (*_synchronous(), *_asynchronous())}
SIGMAS = (0.0, 0.5, 1.0, 1.5)
"""Spread of the waits. The control without waits has mean wait 0."""
