"""The rollout section refuses settings that cannot work together, and names them."""

from typing import Any

import pytest

from agentrl.config import parse
from agentrl.errors import ConfigError


def tree(**rollout: Any) -> dict[str, Any]:
    return {"name": "n", "env": {"target": "ModMath-v0"}, "model": {"path": "m"}, "rollout": rollout}


def test_compaction_begins_when_a_turn_and_its_answer_would_not_fit() -> None:
    config = parse(tree(compaction="drop", max_context=1000, max_turn_tokens=300, tool_output_tokens=100), source="x")
    assert config.rollout.compaction_tokens == 600


@pytest.mark.parametrize(
    "rollout",
    [
        {"compact_at_tokens": 2048},
        {"max_context": 600, "max_turn_tokens": 500, "tool_output_tokens": 100},
    ],
)
def test_compaction_without_room_is_refused(rollout: dict[str, Any]) -> None:
    parse(tree(**rollout), source="x")
    with pytest.raises(ConfigError, match="must be above 0 and below"):
        parse(tree(compaction="summarize", **rollout), source="x")


def test_a_fraction_of_lag_that_is_no_group_is_refused() -> None:
    assert parse(tree(max_lag=1.25), source="x").rollout.lag_bound == 2
    with pytest.raises(ConfigError, match=r"max_lag=0.1 with groups_per_step=8: .* Set max_lag=0, or at least 0.125"):
        parse(tree(max_lag=0.1), source="x")


def test_a_floor_of_the_ess_ratio_needs_lag_to_reduce() -> None:
    parse(tree(max_lag=0.5) | {"algorithm": {"ess_floor": 0.3}}, source="x")
    with pytest.raises(ConfigError, match=r"ess_floor=0.3 does nothing with rollout.max_lag=0: .*refuse_below"):
        parse(tree(max_lag=0) | {"algorithm": {"ess_floor": 0.3}}, source="x")


def test_replay_that_remembers_too_few_groups_is_refused() -> None:
    parse(tree(replay={"recent": 0.2, "capacity": 32}), source="x")
    with pytest.raises(ConfigError, match=r"adds up to 32 earlier groups .* Set replay.capacity=32 or more"):
        parse(tree(replay={"recent": 0.2, "capacity": 31}), source="x")


@pytest.mark.parametrize(
    ("rollout", "what"),
    [
        ({"oversample": 2, "on_stale": "finish"}, r"oversample=2 with max_lag=2: .* Set max_lag=0"),
        ({"oversample": 1.5, "max_lag": 0}, r"oversample=1.5 with on_stale=drop: .* Set on_stale=finish"),
        ({"partial": "mask", "max_lag": 0, "on_stale": "finish"}, "partial=mask .* only with oversample above 1"),
        ({"partial": "restart", "max_lag": 0}, "partial=restart .* only with oversample above 1"),
        ({"oversample": 2, "partial": "restart"}, r"oversample=2 with max_lag=2: .* Set max_lag=0"),
        (
            {"oversample": 2, "max_lag": 0, "on_stale": "finish", "partial": "restart"},
            "on_stale=finish does nothing with partial=restart",
        ),
        (
            {"oversample": 2, "max_lag": 0, "on_stale": "finish", "partial": "mask", "replay": {}},
            "every token of a group that replay repeats. Set partial=keep",
        ),
    ],
)
def test_oversampling_that_cannot_work_is_refused_with_the_fix(rollout: dict[str, Any], what: str) -> None:
    parse(tree(oversample=2, max_lag=0, on_stale="finish", partial="mask"), source="x")
    parse(tree(oversample=1.25, max_lag=0, partial="restart"), source="x")
    with pytest.raises(ConfigError, match=what):
        parse(tree(**rollout), source="x")


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="one of auto, hermes, fences, retool"):
        parse(tree(tool_format="xml"), source="x")
