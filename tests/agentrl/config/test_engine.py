"""The engine section refuses settings that cannot work together, and names them."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config import parse
from agentrl.errors import ConfigError


def tree(*, rollout: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    base = {"name": "n", "env": {"target": "ModMath-v0"}, "model": {"path": "m"}}
    return {**base, "rollout": rollout or {}, "engine": engine}


def test_an_engine_that_sleeps_while_rollouts_go_on_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_lag=2: rollouts go on.*Set rollout\.max_lag=0"):
        parse(tree(sleep_while_training=True), source="x")
    assert parse(tree(sleep_while_training=True, rollout={"max_lag": 0}), source="x").engine.sleep_while_training


@pytest.mark.parametrize("transfer", ["reload", "gloo", "nccl", "ipc"])
def test_ways_that_send_all_weights_are_refused_with_weight_delta(transfer: str) -> None:
    with pytest.raises(ConfigError, match=rf"weight_delta=8: weight_transfer={transfer} sends all weights"):
        parse(tree(weight_delta=8, weight_transfer=transfer), source="x")
    assert parse(tree(weight_delta=8, weight_transfer="safetensors"), source="x").engine.weight_delta == 8


def test_all_weights_every_time_is_no_delta() -> None:
    with pytest.raises(ConfigError, match=r"engine\.weight_delta"):
        parse(tree(weight_delta=1), source="x")
    assert parse(tree(), source="x").engine.weight_delta is None
