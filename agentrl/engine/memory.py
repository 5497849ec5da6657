"""How an engine and the learner divide the memory of a GPU: the engine's share, its KV cache, and the learner's cap.

Arithmetic on the settings, the size of the GPU and the size of the weights. The reserves are estimates, not measured on
a GPU. Imports neither torch nor vllm.

| engine | share of the GPU (`engine.gpu_memory_fraction: null`) | KV cache (`engine.kv_cache_bytes: null`) |
|---|---|---|
| has the GPU to itself | 0.9 | what is left of the share, measured by vLLM when it starts |
| beside the learner | 0.3 | what is left of the share by `kv_cache_bytes`, so that a restart measures nothing |
| in turn with it (`engine.sleep_while_training`) | 0.5 | the same |
"""

from __future__ import annotations

from agentrl.config import EngineConfig
from agentrl.errors import ConfigError

ALONE, BESIDE, IN_TURN = 0.9, 0.3, 0.5
CPU_KV_CACHE_BYTES = 2**28
MIN_CHECKED = 0.01
ENGINE_BASE_BYTES = 2**30
"""CUDA context, cuBLAS, Triton: what an engine of any size takes."""
ENGINE_WORK = 0.1
"""Share of the engine's memory for activations, CUDA graphs and buffers."""
ASLEEP_BYTES = 2 * 2**30
"""What an engine keeps that sleeps: its CUDA context, CUDA graphs, buffers."""
FRAGMENTATION = 0.05
"""Of the learner's tensors: what torch's allocator cannot use. An assumption."""
OUTSIDE_BYTES = 3 * 2**29
"""What the learner takes outside of torch's allocator, which alone obeys a cap: CUDA context, cuBLAS, NCCL."""


def engine_fraction(config: EngineConfig, *, is_shared: bool) -> float:
    """The share of a GPU's memory that the engine takes.

    >>> engine_fraction(EngineConfig(), is_shared=False), engine_fraction(EngineConfig(), is_shared=True)
    (0.9, 0.3)
    """
    if config.gpu_memory_fraction is not None:
        return config.gpu_memory_fraction
    if not is_shared:
        return ALONE
    return IN_TURN if config.sleep_while_training else BESIDE


def kv_cache_bytes(config: EngineConfig, *, total_bytes: int | None, weights_bytes: int | None) -> int:
    """The KV cache of an engine on each GPU that it shares with the learner.

    Args:
        total_bytes: memory of the GPU; None where it is not known.
        weights_bytes: of the weights on one GPU; None where they are not known.

    Raises ConfigError where nothing is left, where engine.kv_cache_bytes is more than what is left, and where neither
    that nor a size is known.

    >>> gib = 2**30
    >>> kv_cache_bytes(EngineConfig(gpu_memory_fraction=0.5), total_bytes=80 * gib, weights_bytes=4 * gib) / gib
    31.0
    """
    wanted = config.kv_cache_bytes
    if total_bytes is None or weights_bytes is None:
        if wanted is not None:
            return wanted
        what = "the GPU's memory" if total_bytes is None else "the model's weights"
        raise ConfigError(
            f"the engine shares its GPU with the learner, and the size of {what} is not known: set "
            "engine.kv_cache_bytes, e.g. 8589934592"
        )
    fraction = engine_fraction(config, is_shared=True)
    share = fraction * total_bytes
    left = round(share * (1 - ENGINE_WORK)) - ENGINE_BASE_BYTES - weights_bytes
    if left <= 0:
        raise ConfigError(
            f"engine.gpu_memory_fraction={fraction:g} of a GPU of {total_bytes / 1e9:.3g} GB leaves no KV cache: the "
            f"weights take {weights_bytes / 1e9:.3g} GB, and about {(share - left - weights_bytes) / 1e9:.2g} GB go to "
            "activations and CUDA. Raise it, or take a smaller model"
        )
    if wanted is not None and wanted > left:
        raise ConfigError(
            f"engine.kv_cache_bytes={wanted}: engine.gpu_memory_fraction={fraction:g} of a GPU of "
            f"{total_bytes / 1e9:.3g} GB leaves {left} for it, and the learner uses the rest. Lower it, or raise "
            "engine.gpu_memory_fraction"
        )
    return wanted or left


def cpu_kv_cache_bytes(config: EngineConfig) -> int:
    """The KV cache of an engine on the CPU. Example: `cpu_kv_cache_bytes(EngineConfig())` is 256 MiB."""
    return CPU_KV_CACHE_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes


def checked_fraction(*, total_bytes: int | None, weights_bytes: int | None) -> float:
    """The share that must be free when an engine starts beside the learner: room for the weights.

    vLLM refuses to start below it, and ignores it where the KV cache has a size of its own.

    >>> checked_fraction(total_bytes=80, weights_bytes=4)
    0.05
    """
    if not total_bytes or not weights_bytes:
        return MIN_CHECKED
    return min(1.0, max(MIN_CHECKED, round(weights_bytes / total_bytes, 3)))


def learner_fraction(config: EngineConfig, *, total_bytes: int, engine_sleeps: bool) -> float:
    """The share of a GPU that torch may take in the learner, beside an engine that is awake or asleep.

    Raises ConfigError where nothing is left.

    >>> gib = 2**30
    >>> beside = EngineConfig(gpu_memory_fraction=0.25)
    >>> learner_fraction(beside, total_bytes=100 * gib, engine_sleeps=False)
    0.735
    >>> learner_fraction(beside, total_bytes=100 * gib, engine_sleeps=True)
    0.965
    """
    engine = ASLEEP_BYTES if engine_sleeps else engine_fraction(config, is_shared=True) * total_bytes
    left = total_bytes - engine - OUTSIDE_BYTES
    if left <= 0:
        raise ConfigError(
            f"engine.gpu_memory_fraction={engine_fraction(config, is_shared=True):g} leaves the learner nothing of a "
            f"GPU of {total_bytes / 1e9:.3g} GB that both use: lower it"
        )
    return left / total_bytes
