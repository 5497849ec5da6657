"""vLLM's own sleep and wake-up on a GPU, with its calls of CUDA pretended: what our order of calls relies on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

WEIGHTS, CACHE = 1, 2  # addresses
SIZES = {WEIGHTS: 100, CACHE: 400}
ROOM = 500


class Layer(nn.Module):
    """A weight, which a checkpoint has, and a buffer, which it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class Gpu:
    """Memory that vLLM's allocator maps and unmaps, of which another process may have a part."""

    def __init__(self, model: Layer) -> None:
        self.model = model
        self.mapped = {WEIGHTS, CACHE}
        self.others = 0

    def free(self) -> int:
        return ROOM - self.others - sum(SIZES[address] for address in self.mapped)

    def release(self, handle: tuple[int, int, int, int]) -> None:
        self.mapped.remove(handle[2])
        if handle[2] == WEIGHTS:
            with torch.no_grad():
                self.model.weight.fill_(torch.nan)
                self.model.table.fill_(torch.nan)

    def take(self, handle: tuple[int, int, int, int]) -> None:
        if self.free() < handle[1]:
            raise RuntimeError("CUDA Error: out of memory")
        self.mapped.add(handle[2])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    from vllm import device_allocator
    from vllm.device_allocator import AllocationData, cumem

    gpu, allocator = Gpu(Layer()), cumem.CuMemAllocator()
    for address, tag in ((WEIGHTS, "weights"), (CACHE, "kv_cache")):
        allocator.pointer_to_data[address] = AllocationData((0, SIZES[address], address, 0), tag)
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: allocator)
    monkeypatch.setattr(cumem, "unmap_and_release", gpu.release)
    monkeypatch.setattr(cumem, "create_and_map", gpu.take)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (gpu.free(), ROOM))
    return gpu


@pytest.fixture
def worker(gpu: Gpu) -> Any:
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend
    from vllm.v1.worker.gpu_worker import Worker

    names = ("sleep", "wake_up", "_save_sleep_parameters")
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(model=gpu.model),
        sleep_mode_backend=CuMemBackend(),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
        model_config=SimpleNamespace(sleep_preserve_parameter_names=[]),
        get_draft_model=lambda: None,
        synchronize_device=lambda: None,
        _sleep_saved_parameters={},
        _sleep_saved_draft_buffers={},
    )
    vars(worker).update({name: getattr(Worker, name).__get__(worker) for name in names})
    return worker


def test_weights_can_be_written_while_the_cache_still_sleeps_and_buffers_are_put_back(gpu: Gpu, worker: Any) -> None:
    worker.sleep(2)
    assert gpu.mapped == set() and gpu.model.table.isnan().all()
    gpu.others = 400  # the learner has not yet given back what the cache needs
    worker.wake_up(["weights"])
    assert gpu.mapped == {WEIGHTS}
    assert gpu.model.weight.isnan().all()  # whence an update must follow before anything is generated
    assert torch.equal(gpu.model.table, torch.arange(3.0))
    gpu.others = 0
    worker.wake_up(["kv_cache"])
    assert gpu.mapped == {WEIGHTS, CACHE} and torch.equal(gpu.model.table, torch.arange(3.0))


def test_a_wake_up_that_found_no_memory_can_be_repeated(gpu: Gpu, worker: Any) -> None:
    worker.sleep(2)
    worker.wake_up(["weights"])
    gpu.others = 200
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.wake_up(["kv_cache"])
    assert gpu.mapped == {WEIGHTS}
    gpu.others = 0
    worker.wake_up(["kv_cache"])
    assert gpu.mapped == {WEIGHTS, CACHE}
