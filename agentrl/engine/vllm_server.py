"""Waiting for a vLLM server that starts: until it answers, or with the cause from its log.

Independent of what the server was started with, which is in vllm_command.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import httpx

from agentrl.config import EngineConfig
from agentrl.engine.vllm_command import has_nvidia_device
from agentrl.errors import EngineError

POLL_S = 0.1
CPU_START_TIMEOUT_S, GPU_START_TIMEOUT_S = 180.0, 600.0  # a first start on a GPU compiles the model and its kernels
FIXES = (
    (
        r"out of memory|can't allocate memory|cannot allocate memory|bad_alloc|is less than (requested|desired)|Killed",
        "it ran out of memory: lower engine.kv_cache_bytes or, on a GPU, engine.gpu_memory_fraction, "
        "engine.max_num_seqs or rollout.max_context, or take a smaller model",
    ),
    (
        r"architectures? .*not supported|no supported (architecture|model)|Cannot find model module",
        "this vLLM cannot serve the architecture in the model's config.json; see its list of supported models",
    ),
    (
        r"all CUDA-capable devices are busy or unavailable|CUDA-capable device\(s\) is/are busy",
        "the GPU admits one process: `sudo nvidia-smi -c DEFAULT`, or give it a GPU of its own (engine.gpus)",
    ),
    (r"address already in use", "another program has the port: choose another engine.port, or 0 for any free one"),
    (
        r"Failed to find C compiler|Python\.h: No such file",
        "Triton misses a C compiler or Python's headers: `agentrl doctor` names the command that installs them",
    ),
    (
        r"driver on your system is too old|driver version is insufficient|libcuda\.so\.1: cannot open",
        "NVIDIA's driver is missing or older than this CUDA build needs: `agentrl doctor` says which",
    ),
    (
        r"max seq len \(|max_model_len \(\d+\) is greater",
        "rollout.max_context does not fit: lower it, or give the KV cache more memory",
    ),
)
"""Patterns of a log, and how to fix the cause."""
ERROR_LINE = re.compile(r"^\s*[\w.]*(?:Error|Exception): .*(?:\n\s+\S.*){0,2}", re.MULTILINE)
TAIL_LINES = 12


def start_timeout_s(config: EngineConfig) -> float:
    """How long an engine may take to load its model and answer: `engine.start_timeout_s`, or by what it runs on."""
    if config.start_timeout_s is not None:
        return config.start_timeout_s
    return GPU_START_TIMEOUT_S if config.urls or has_nvidia_device() else CPU_START_TIMEOUT_S


def publication_timeout_s(config: EngineConfig) -> float:
    """Deadline of one publication: an engine may be restarted in its middle, and receive the weights twice."""
    return start_timeout_s(config) + 2 * config.update_timeout_s + config.request_timeout_s


async def wait_ready(url: str, *, poll: Callable[[], int | None], log: Callable[[], str], timeout_s: float) -> None:
    """Return once the server at `url` answers.

    Args:
        poll: exit code of the server's process, None while it runs (or is not ours).
        log: its log, or enough of its end.

    Raises:
        EngineError: with the end of the log, when the process ended or `timeout_s` passed.
    """
    async with httpx.AsyncClient(base_url=url, timeout=5.0) as client:
        try:
            async with asyncio.timeout(timeout_s):
                while not await _healthy(client):
                    if (code := poll()) is not None:
                        raise EngineError(f"the engine ended with exit code {code} while starting.{_why(log)}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise EngineError(
                f"the engine at {url} was not ready within {timeout_s:g} s; "
                f"raise engine.start_timeout_s or see its log.{_why(log)}"
            ) from error


async def _healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


def _why(log: Callable[[], str]) -> str:
    """From the log: the first error, which is the cause of the others, how to fix it if that is known, and the end."""
    text = log()
    if not text:
        return ""
    first = ERROR_LINE.search(text)
    cause = f" It says: {first[0].strip()[:500]}." if first else ""
    fixes = "".join(f" It seems that {fix}." for pattern, fix in FIXES if re.search(pattern, text, re.IGNORECASE))
    return f"{cause}{fixes} The end of its log:\n" + "\n".join(text.splitlines()[-TAIL_LINES:])
