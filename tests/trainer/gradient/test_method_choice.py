"""Which method `learner.gradient` gives an objective, and which combinations are refused, with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import AlgorithmConfig
from agentrl.errors import ConfigError
from tests.trainer.trainer_builders import config
from trainer.gradient.method_choice import possible
from trainer.objective.policy_gradient import PolicyGradient


class WholeBatch(PolicyGradient):
    """An objective of the user's whose weights and whose baseline both need everything first."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        super().__init__(algorithm)
        self.needs_batch = True


class OwnBaselines(PolicyGradient):
    """An objective of the user's, which the config knows nothing about."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        super().__init__(algorithm)
        self.has_own_baselines = True


LEAVE_ONE_OUT = {"preset": "vcpo", "baseline": "opob_leave_one_out"}


def choose(method: str, algorithm: dict[str, Any]) -> str:
    (first, *_) = possible(config(Path("model"), learner={"gradient": method}, algorithm=algorithm))
    return first


@pytest.mark.parametrize("method", ["one_pass", "one_pass_sharded", "two_pass"])
def test_exact_norms_of_one_baseline_a_group_go_every_way(method: str) -> None:
    assert choose(method, {"preset": "vcpo"}) == method


@pytest.mark.parametrize("baseline", ["opob_leave_one_out", "opob_safe_leave_one_out"])
def test_auto_makes_two_passes_where_each_episode_has_its_own_baseline(baseline: str) -> None:
    assert choose("auto", {"preset": "vcpo", "baseline": baseline}) == "two_pass"


def test_auto_keeps_no_sums_where_norms_are_by_proxy() -> None:
    assert choose("auto", {"preset": "vcpo", "baseline_norms": "proxy"}) == "two_pass"


@pytest.mark.parametrize(
    ("method", "algorithm", "fix"),
    [
        ("one_pass", LEAVE_ONE_OUT, "learner.gradient: two_pass"),
        ("one_pass_sharded", LEAVE_ONE_OUT, "learner.gradient: two_pass"),
        ("one_pass_sharded", {"preset": "grpo"}, "learner.gradient: auto"),
        ("one_pass_sharded", {"baseline_norms": "proxy"}, "learner.gradient: auto"),
        ("two_pass", {"preset": "rloo"}, "learner.gradient: auto"),
    ],
)
def test_a_method_that_cannot_make_the_gradient_is_refused(method: str, algorithm: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix) as refused:  # when the config is read
        choose(method, algorithm)
    assert f"learner.gradient={method}" in str(refused.value)


@pytest.mark.parametrize("name", ["OwnBaselines", "WholeBatch"])
def test_a_class_of_the_users_is_asked_what_it_needs(name: str) -> None:
    algorithm = {"preset": "vcpo", "objective": f"{__name__}:{name}"}
    assert choose("auto", algorithm) == "two_pass"
    with pytest.raises(ConfigError, match="set learner"):
        choose("one_pass", algorithm)
