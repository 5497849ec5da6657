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
