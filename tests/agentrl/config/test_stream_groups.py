"""learner.stream_groups is refused where a batch is not known before it is whole."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config import Config, InvalidConfig, parse


def streaming(rollout: dict[str, Any], **sections: Any) -> Config:
    tree = {"name": "t", "env": {"target": "x:Y"}, "model": {"path": "m"}, "learner": {"stream_groups": True}}
    return parse({**tree, "rollout": {"max_lag": 0, **rollout}, **sections}, source="x")


@pytest.mark.parametrize("preset", ["grpo", "vcpo_safe", "vcpo", "tis", "gspo"])
def test_it_is_possible_without_lag(preset: str) -> None:
    assert streaming({}, algorithm={"preset": preset}).learner.stream_groups


@pytest.mark.parametrize(
    ("rollout", "named"),
    [
        ({"max_lag": 2}, "rollout.max_lag=2.*Set rollout.max_lag=0"),
        ({"oversample": 2, "on_stale": "finish"}, "rollout.oversample=2.*Set rollout.oversample=1"),
        ({"replay": {"recent": 0.5}}, "rollout.replay.*Set rollout.replay=null"),
    ],
)
def test_rollouts_that_choose_a_batch_late_are_refused(rollout: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"learner.stream_groups with {named}.*learner.stream_groups=false"):
        streaming(rollout)


def test_an_engine_that_sleeps_in_the_meantime_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"learner.stream_groups with engine.sleep_while_training"):
        streaming({}, engine={"sleep_while_training": True})


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "m2po"},
        {"preset": "bapo"},
        {"preset": "otb"},
        {"preset": "grpo", "spurious": {"probability": 0.01, "entropy_quantile": 0.2}},
        {"preset": "rloo", "kl": "reward", "kl_beta": 0.1},
    ],
)
def test_algorithms_that_look_at_the_whole_batch_are_refused(algorithm: dict[str, Any]) -> None:
    model = {"path": "m", **({"reference": "initial"} if "kl" in algorithm else {})}
    with pytest.raises(InvalidConfig, match=r"weighs each episode by the whole batch.*learner.stream_groups=false"):
        streaming({}, algorithm=algorithm, model=model)
