"""The settings that each of several servers gets, and settings for several that cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config import Config, EngineConfig
from agentrl.engine import launch_servers, vllm_command
from agentrl.errors import ConfigError
from agentrl.supervision.child import Spot
from tests.agentrl.conftest import pretend_gpus


def test_each_replica_has_its_port_and_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 8)
    engine = {"replicas": 2, "port": 8000, "tensor_parallel": 2, "gpus": [0, 1, 4, 5]}
    config = Config.model_validate({"name": "run", "env": {"target": "a:B"}, "model": {"path": "m"}, "engine": engine})
    placement = vllm_command.placement_of(config)
    needs = [launch_servers.engine_needs(config.engine, index, placement) for index in range(2)]
    assert [(need.host, need.port) for need in needs] == [("127.0.0.1", 8000), ("127.0.0.1", 8001)]
    spots = [Spot(host=need.host, port=need.port or 0) for need in needs]
    started = [launch_servers._command(config, "m", index, None, placement, spot) for index, spot in enumerate(spots)]
    found = [(argv[argv.index("--port") + 1], env["CUDA_VISIBLE_DEVICES"]) for argv, env in started]
    assert found == [("8000", "0,1"), ("8001", "4,5")]
    assert placement.learner_environment()["CUDA_VISIBLE_DEVICES"] == "2"


def test_engines_that_only_evaluate_come_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 4)
    tree = {"name": "run", "env": {"target": "a:B"}, "model": {"path": "m"}, "engine": {"replicas": 2}}
    config = Config.model_validate({**tree, "eval": {"engines": 1}})
    placement = vllm_command.placement_of(config)
    assert str(placement) == (
        "learner on GPU 0; engine-0 on GPU 1; engine-1 on GPU 2; engine for evaluations on GPU 3; "
        "weights by safetensors"
    )
    assert launch_servers._indexes(config, is_spare=False) == {0: "engine-0", 1: "engine-1"}
    assert launch_servers._indexes(config, is_spare=True) == {2: "eval-engine"}
    _, env = launch_servers._command(config, "m", 2, None, placement, Spot(host="127.0.0.1", port=9000))
    assert env["CUDA_VISIBLE_DEVICES"] == "3"
    alone = Config.model_validate({**tree, "engine": {"url": "http://a:1"}, "eval": {"engines": 2}})
    assert launch_servers._indexes(alone, is_spare=True) == {0: "eval-engine-0", 1: "eval-engine-1"}
    pretend_gpus(monkeypatch, 3)
    with pytest.raises(ConfigError, match=r"needs 4 GPUs \(.*eval.engines=1 of as many\).*set eval.engines=0"):
        vllm_command.placement_of(config)


def test_on_ray_an_engine_asks_for_its_gpus_and_is_told_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    engine = {"replicas": 3, "tensor_parallel": 4}
    tree = {"name": "run", "env": {"target": "a:B"}, "model": {"path": "m"}, "engine": engine, "place": "ray"}
    config = Config.model_validate(tree)
    placement = vllm_command.placement_of(config)
    needs = launch_servers.engine_needs(config.engine, 2, placement)
    assert (needs.part, needs.bundle, needs.port) == ("engine", {"CPU": 1.0, "GPU": 4.0}, 0)
    spot = Spot(host="10.0.0.3", port=9000)
    argv, env = launch_servers._command(config, "m", 2, "secret", placement, spot)
    assert "CUDA_VISIBLE_DEVICES" not in env and "secret" not in argv
    assert argv[argv.index("--host") + 1 : argv.index("--host") + 4 : 2] == ["10.0.0.3", "9000"]
    with pytest.raises(ConfigError, match="can be reached by others, and there is no token"):
        launch_servers._command(config, "m", 2, None, placement, spot)


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
