"""The settings that each of several servers gets, and settings for several that cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config import Config, EngineConfig
from agentrl.engine import launch_servers, vllm_command
from tests.agentrl.conftest import pretend_gpus


def test_each_replica_has_its_port_and_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 8)
    monkeypatch.setattr(launch_servers, "configured_port", lambda host, port, key: port)
    engine = {"replicas": 2, "port": 8000, "tensor_parallel": 2, "gpus": [0, 1, 4, 5]}
    config = Config.model_validate({"name": "run", "env": {"target": "a:B"}, "model": {"path": "m"}, "engine": engine})
    placement = vllm_command.placement_of(config)
    started = [launch_servers._command(config, "m", index, None, placement) for index in range(2)]
    found = [(url, env["CUDA_VISIBLE_DEVICES"]) for url, _, env in started]
    assert found == [("http://127.0.0.1:8000", "0,1"), ("http://127.0.0.1:8001", "4,5")]
    assert placement.learner_environment()["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"replicas": 2, "weight_transfer": "ipc"}, "several take their weights by nccl"),
        ({"replicas": 2, "weight_transfer": "nccl", "update_order": "rolling"}, "update_order=simultaneous"),
        ({"url": ["http://a", "http://b"], "weight_transfer": "gloo", "update_order": "rolling"}, "one broadcast"),
        ({"url": "http://a", "replicas": 2}, "give one of them"),
        ({"url": []}, "leave it out"),
        ({"replicas": 2, "tensor_parallel": 2, "gpus": [0, 1, 2]}, "need 4 of gpus"),
        ({"tensor_parallel": 2, "gpus": [1]}, "need 2 of gpus"),
        ({"gpus": [1, 1]}, "names one twice"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_how_to_fix_them(keys: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        EngineConfig.model_validate(keys)
