"""The learner's cap on a GPU that it shares, with torch's calls recorded: what runs here has no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from agentrl.config import EngineConfig
from agentrl.errors import ConfigError, LearnerError
from tests.agentrl.training.troubles import Trouble
from trainer.gpu_memory import GpuShare, check_allocator

TOTAL = 100 * 2**30
FULL = Trouble("LearnerError: the learner's GPU is full: ... torch says: ...")
KEEPS = Trouble(
    "LearnerError: the learner keeps ... GB of its GPU between steps, and beside the engine, which wakes with "
    "engine.gpu_memory_fraction=..."
)


class Gpu:
    """A GPU of 100 GiB, and what was asked of torch about it."""

    def __init__(self) -> None:
        self.caps: list[float] = []
        self.num_emptied = 0
        self.reserved = 0

    def empty_cache(self) -> None:
        self.num_emptied += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=TOTAL))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", gpu.caps.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", gpu.empty_cache)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: gpu.reserved)
    return gpu


def test_beside_the_engine_the_cap_is_what_the_engine_leaves(gpu: Gpu) -> None:
    share = GpuShare(EngineConfig(gpu_memory_fraction=0.25), is_shared=True)
    assert gpu.caps == [0.735]
    share.begin_step()
    gpu.reserved = int(0.73 * TOTAL)
    share.make_room()
    assert gpu.caps == [0.735] and gpu.num_emptied == 1


def test_in_turn_with_the_engine_the_step_has_nearly_all(gpu: Gpu) -> None:
    share = GpuShare(EngineConfig(gpu_memory_fraction=0.25, sleep_while_training=True), is_shared=True)
    share.make_room()
    share.begin_step()
    share.make_room()
    assert gpu.caps == [0.735, 0.735, 0.965, 0.735] and gpu.num_emptied == 2


def test_a_learner_that_keeps_the_engines_memory_is_named_before_the_engine_wakes(gpu: Gpu) -> None:
    share = GpuShare(EngineConfig(gpu_memory_fraction=0.25, sleep_while_training=True), is_shared=True)
    share.begin_step()
    gpu.reserved = int(0.8 * TOTAL)
    with pytest.raises(LearnerError, match=r"keeps 85\.9 GB.*fraction=0\.25, 78\.9 GB are its") as found:
        share.make_room()
    assert KEEPS.is_in(f"LearnerError: {found.value}")


def test_a_full_gpu_names_the_cap_and_what_lowers_the_need(gpu: Gpu) -> None:
    share = GpuShare(EngineConfig(gpu_memory_fraction=0.25), is_shared=True)
    message = r"may take 78\.9 of 107 GB.*learner\.pack_tokens.*tried 3 GiB"
    with pytest.raises(LearnerError, match=message) as found, share.explained():
        raise torch.OutOfMemoryError("tried 3 GiB")
    assert FULL.is_in(f"LearnerError: {found.value}")


def test_a_gpu_of_its_own_is_not_capped(gpu: Gpu) -> None:
    share = GpuShare(EngineConfig(), is_shared=False)
    share.begin_step()
    share.make_room()
    assert gpu.caps == [] and gpu.num_emptied == 0
    with pytest.raises(LearnerError, match=r"is full: lower learner\.pack_tokens") as found, share.explained():
        raise torch.OutOfMemoryError("tried 3 GiB")
    assert "gpu_memory_fraction" not in str(found.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_on_a_cpu_nothing_happens() -> None:
    share = GpuShare(EngineConfig(), is_shared=True)
    share.begin_step()
    share.make_room()


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_cuda_ipc_cannot_share_is_refused(name: str) -> None:
    check_allocator({name: "max_split_size_mb:64,expandable_segments:False"})
    with pytest.raises(ConfigError, match=f"{name}=.*Take expandable_segments out of it"):
        check_allocator({name: "max_split_size_mb:64, expandable_segments:True"})
