"""The settings that each of several servers gets, and settings for several that cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config import EngineConfig
from agentrl.engine import launch_servers, vllm_command
from agentrl.errors import ConfigError


def test_each_replica_has_its_port_and_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_command, "device_of", lambda settings: "cuda")
    settings = EngineConfig(replicas=2, port=8000, tensor_parallel=2, gpus=(0, 1, 4, 5))
    replicas = [launch_servers._of_replica(settings, index) for index in range(2)]
    assert [(one.port, one.gpus) for one in replicas] == [(8000, (0, 1)), (8001, (4, 5))]


def test_gpus_that_are_to_be_divided_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_command, "device_of", lambda settings: "cuda")
    with pytest.raises(ConfigError, match=r"name the GPUs to divide, e\.g\. engine\.gpus=\[0,1\]"):
        launch_servers._of_replica(EngineConfig(replicas=2), 0)


def test_free_ports_stay_free_for_all() -> None:
    settings = EngineConfig(replicas=2)
    assert [launch_servers._of_replica(settings, index).port for index in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"replicas": 2, "weight_transfer": "nccl"}, "safetensors or reload"),
        ({"url": ["http://a", "http://b"], "weight_transfer": "gloo"}, "safetensors or reload"),
        ({"url": "http://a", "replicas": 2}, "give one of them"),
        ({"url": []}, "leave it out"),
        ({"replicas": 2, "tensor_parallel": 2, "gpus": [0, 1, 2]}, "need 4 of gpus"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_how_to_fix_them(keys: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        EngineConfig.model_validate(keys)


def test_several_take_their_weights_from_a_folder() -> None:
    assert vllm_command.transfer_of(EngineConfig(url=("http://a", "http://b"))) == "safetensors"
    assert vllm_command.transfer_of(EngineConfig(replicas=2, device="cpu")) == "safetensors"
