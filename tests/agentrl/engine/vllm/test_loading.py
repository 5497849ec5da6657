"""How the tensors of an update are summed on their way into vLLM's model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.engine.checksum import checksum_of
from agentrl.engine.vllm import loading

TENSORS = [(f"layer {i}", torch.full((3, 4), float(i))) for i in range(9)]


class Model:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.taken: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.taken |= dict(weights)


def test_on_a_cpu_the_same_tensors_are_loaded_and_summed() -> None:
    model = Model()
    through = loading.LoadingModel(model, torch.device("cpu"))
    through.load_weights(TENSORS[:4])
    through.load_weights(TENSORS[4:])
    assert all(model.taken[name] is tensor for name, tensor in TENSORS)
    assert through.checksum.hexdigest() == checksum_of(TENSORS)


def test_elsewhere_they_are_copied_first_and_summed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a GPU: what is on it has no values, so only the places can be compared."""
    summed: list[tuple[str, str]] = []

    def add(self: Any, name: str, tensor: Tensor) -> None:
        summed.append((name, tensor.device.type))

    monkeypatch.setattr(loading.Checksum, "add", add)
    model = Model()
    loading.LoadingModel(model, torch.device("meta")).load_weights(TENSORS)
    assert summed == [(name, "meta") for name, _ in TENSORS]
    assert all(tensor.device.type == "meta" for tensor in model.taken.values())


@pytest.mark.gpu
def test_a_gpu_sums_what_came_from_host_memory() -> None:
    model = Model()
    through = loading.LoadingModel(model, torch.device("cuda", 0))
    through.load_weights(TENSORS)
    assert through.checksum.hexdigest() == checksum_of(TENSORS)
    assert all(tensor.is_cuda for tensor in model.taken.values())
