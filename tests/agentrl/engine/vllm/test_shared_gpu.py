"""Starting an engine on a GPU that a busy learner uses: vLLM's own worker code, with the memory of a pretended GPU.

Without a KV cache of a fixed size vLLM measures what it takes by how much free memory falls, so whatever the learner
does meanwhile is counted as the engine's. With the flags that agentrl passes it measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.config import EngineConfig
from agentrl.engine import memory

GIB = 2**30
TOTAL = 80 * GIB
WEIGHTS = 4 * GIB
LEARNER = 52 * GIB


class Gpu:
    """Its free memory is what the learner and the engine have left of it."""

    def __init__(self) -> None:
        self.learner = LEARNER
        self.engine = 0

    def info(self, device: object = None) -> tuple[int, int]:
        return TOTAL - self.learner - self.engine, TOTAL

    def reserved(self, device: object = None) -> int:
        return self.engine

    def stats(self, device: object = None) -> dict[str, int]:
        return {"allocated_bytes.all.peak": self.engine + GIB, "allocated_bytes.all.current": self.engine}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    from vllm.v1.worker import gpu_worker

    gpu = Gpu()
    for name, replaced in {
        "get_memory_info": gpu.info,
        "memory_reserved": gpu.reserved,
        "memory_stats": gpu.stats,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, replaced)
    platform = gpu_worker.current_platform
    monkeypatch.setattr(platform, "is_integrated_gpu", lambda index: False, raising=False)
    monkeypatch.setattr(platform, "current_device", lambda: "cpu", raising=False)
    return gpu


@cache
def default_config() -> Any:
    from vllm.config import VllmConfig

    return VllmConfig()


def started(gpu: Gpu, *, fraction: float, kv_bytes: int | None, meanwhile: Callable[[], None]) -> int:
    """The KV cache of a worker that starts now, as vLLM computes it. `meanwhile` happens during its profile run."""
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.utils import request_memory

    class Runner:
        model_memory_usage = WEIGHTS

        def profile_run(self, **options: Any) -> None:
            meanwhile()

    cache = SimpleNamespace(gpu_memory_utilization=fraction, kv_cache_memory_bytes=kv_bytes)
    worker: Any = SimpleNamespace(
        cache_config=cache,
        vllm_config=default_config(),
        model_config=SimpleNamespace(multimodal_config=None),
        parallel_config=SimpleNamespace(),
        model_runner=Runner(),
        randomize_dummy_inputs=False,
    )
    worker._scoped_allocator_max_split = Worker._scoped_allocator_max_split.__get__(worker)
    worker.init_snapshot = MemorySnapshot(device="cpu")
    worker.requested_memory = request_memory(worker.init_snapshot, cache)
    gpu.engine += WEIGHTS
    return int(Worker.determine_available_memory(worker))


def learner_takes(gpu: Gpu, num_bytes: int) -> Callable[[], None]:
    def take() -> None:
        gpu.learner += num_bytes

    return take


def ours() -> dict[str, Any]:
    config = EngineConfig(gpu_memory_fraction=0.3)
    return {
        "fraction": memory.checked_fraction(total_bytes=TOTAL, weights_bytes=WEIGHTS),
        "kv_bytes": memory.kv_cache_bytes(config, total_bytes=TOTAL, weights_bytes=WEIGHTS),
    }


def test_alone_vllm_measures_what_is_left_of_its_share(gpu: Gpu) -> None:
    gpu.learner = 0
    left = started(gpu, fraction=0.3, kv_bytes=None, meanwhile=lambda: None)
    assert left == pytest.approx(0.3 * TOTAL - WEIGHTS - GIB, abs=2)  # GIB: the peak of activations


def test_a_learner_that_frees_memory_meanwhile_ends_a_start_that_measures(gpu: Gpu) -> None:
    release = learner_takes(gpu, -8 * GIB)
    with pytest.raises(AssertionError, match="other processes sharing the same container release GPU memory"):
        started(gpu, fraction=0.3, kv_bytes=None, meanwhile=release)


def test_a_learner_that_takes_memory_meanwhile_leaves_a_start_that_measures_no_cache(gpu: Gpu) -> None:
    gpu.learner = 30 * GIB
    assert started(gpu, fraction=0.3, kv_bytes=None, meanwhile=learner_takes(gpu, 22 * GIB)) < 0


def test_a_share_that_is_not_free_ends_a_start_that_asks_for_it(gpu: Gpu) -> None:
    gpu.learner = 60 * GIB  # a learner without a cap
    with pytest.raises(ValueError, match="is less than desired GPU memory utilization"):
        started(gpu, fraction=0.3, kv_bytes=None, meanwhile=lambda: None)


@pytest.mark.parametrize("num_bytes", [-8 * GIB, 3 * GIB])
@pytest.mark.parametrize("learner", [LEARNER, 60 * GIB])
def test_with_our_flags_the_start_does_not_depend_on_the_learner(gpu: Gpu, num_bytes: int, learner: int) -> None:
    gpu.learner = learner
    flags = ours()
    assert started(gpu, **flags, meanwhile=learner_takes(gpu, num_bytes)) == flags["kv_bytes"]
