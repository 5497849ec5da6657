"""The section `ray`, and settings that cannot work with `place: ray`."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config import InvalidConfig, parse

RUN = {"name": "run", "env": {"target": "a:B"}, "model": {"path": "m"}}


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"learner": {"hostfile": "hosts", "num_ranks": 2}}, "Set ray.ranks_per_node instead of the file"),
        ({"engine": {"gpus": [0]}}, "Leave it out, or set ray.bundles.engine"),
        ({"engine": {"weight_transfer": "ipc"}}, "engine.weight_transfer=ipc with place=ray"),
        ({"engine": {"sleep_while_training": True}, "rollout": {"max_lag": 0}}, "engine.sleep_while_training with"),
        ({"learner": {"num_ranks": 8}, "ray": {"ranks_per_node": 3}}, "must divide learner.num_ranks=8"),
        ({"ray": {"bundles": {"engine": {"CPU": 0}}}}, "bundles.engine asks for nothing"),
        ({"ray": {"bundles": {"judge": {"CPU": 1}}}}, "ray.bundles"),
        ({"place": "local", "ray": {"address": "a:6379"}}, "the section ray is read only with place=ray"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_how_to_fix_them(keys: dict[str, Any], fix: str) -> None:
    with pytest.raises(InvalidConfig, match=fix):
        parse({**RUN, "place": "ray", **keys}, source="test")


def test_settings_that_can_work_are_not() -> None:
    ray = {"ranks_per_node": 4, "bundles": {"engine": {"GPU": 2, "CPU": 8}, "sandbox": {"sandbox": 1}}}
    config = parse(
        {**RUN, "place": "ray", "learner": {"num_ranks": 8}, "rollout": {"workers": 2}, "ray": ray}, source="test"
    )
    assert config.ray.bundles["engine"] == {"GPU": 2.0, "CPU": 8.0}
