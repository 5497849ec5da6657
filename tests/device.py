"""What the tests run on: the device of the installed vLLM on this machine, engine settings for it, and who sees a GPU.

On a machine with a GPU, engines and runs that tests start use it where vLLM's build is for CUDA. Tests marked `gpu` run
when they are asked for (`pytest -m gpu`). All others compute on the CPU, to whose rounding their bounds belong.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from agentrl.config import EngineConfig
from agentrl.engine import vllm_command
from agentrl.engine.placement import Device
from agentrl.errors import AgentRLError

HAS_GPU = vllm_command.has_nvidia_device()
KV_CACHE_BYTES = 64 * 2**20
GPU_MEMORY_FRACTION = 0.1
"""Of an engine with a tiny model: several run at once, beside the learners of the tests."""
CPU_ONLY = "vLLM is a CUDA build here: {reason}"


@cache
def engine_device() -> Device:
    """Where the installed vLLM runs; `cpu` where none is installed."""
    try:
        return vllm_command.device_of(EngineConfig())
    except AgentRLError:
        return "cpu"


def engine_settings(**changes: Any) -> dict[str, Any]:
    """Keys of the section `engine` for a tiny model on that device.

    Example: `EngineConfig(**engine_settings(stream_interval=1))`.
    """
    own: dict[str, Any] = {"device": engine_device()}
    if engine_device() == "cpu":
        own["kv_cache_bytes"] = KV_CACHE_BYTES
    else:
        own["gpu_memory_fraction"] = GPU_MEMORY_FRACTION
    return {**own, **changes}


def parity_bound() -> float:
    """Largest |engine - learner| logprob in float32 on that device."""
    return 1e-4 if engine_device() == "cpu" else 2e-2


def cpu_engine_only(reason: str) -> pytest.MarkDecorator:
    """Skips a test that needs vLLM's CPU build: `@cpu_engine_only("gloo is for CPUs")`."""
    return pytest.mark.skipif(engine_device() != "cpu", reason=CPU_ONLY.format(reason=reason))


@cache
def num_gpus() -> int:
    """GPUs that torch can use here, counted in a process of its own: this one may keep off them."""
    if not HAS_GPU:
        return 0
    count = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, timeout=120)
    return int(done.stdout) if done.returncode == 0 else 0


def asks_for_gpu(markexpr: str) -> bool:
    """Whether pytest's `-m` selects the tests of a GPU.

    >>> [asks_for_gpu(one) for one in ("gpu", "gpu and not slow", "not gpu", "")]
    [True, True, False, False]
    """
    words = markexpr.replace("(", " ").replace(")", " ").split()
    return any(word == "gpu" and before != "not" for before, word in zip(["", *words], words, strict=False))


def why_not(mark: pytest.Mark, *, markexpr: str, there: int) -> str:
    """Why a test with this mark `gpu` is skipped where `there` GPUs are; empty where it runs."""
    needed = int(mark.kwargs.get("num_gpus", 1))
    if there < needed:
        return f"needs {needed} NVIDIA GPU(s) and a CUDA build of torch; there are {there}"
    if not asks_for_gpu(markexpr):
        return "run it with `pytest -m gpu`: the other tests of this process compute on the CPU"
    return ""


def compute_on_the_cpu() -> None:
    """Hide GPUs from torch, and so from DeepSpeed, in this process; engines and runs that it starts see them."""
    import torch

    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0


def without_gpus() -> dict[str, str]:
    """Variables of a process that computes on the CPU."""
    return {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
