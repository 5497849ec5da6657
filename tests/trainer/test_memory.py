"""The memory that exact norms take, counted tensor by tensor."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.config import AlgorithmConfig
from agentrl.testing import group
from tests.trainer.trainer_builders import architecture, episode
from trainer.gradient import attention
from trainer.gradient.step_gradient import Estimator


class Live(TorchDispatchMode):
    """Measures the peak number of bytes of tensors that are made inside the block and alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, torch.Tensor):
                self._count(one.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = weakref.finalize(storage, self._forget, key, storage.nbytes())
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)

    def _forget(self, key: int, num_bytes: int) -> None:
        del self._known[key]
        self._now -= num_bytes


def peak_bytes(model: Any, algorithm: AlgorithmConfig) -> int:
    episodes = [episode(str(i), reward=float(i % 2), seed=i, shape=((3, 4),)) for i in range(4)]
    estimator = Estimator(model, algorithm)
    with Live() as live:
        estimator.estimate([group(0, episodes)], policy_version=0, num_episodes=4)
    return live.peak


def test_exact_norms_take_one_gradient_more_than_none() -> None:
    """And one weight's own piece at a time: the peak differs by no more than a buffer and the largest weight."""
    model = architecture("Qwen3")
    attention.install(model)
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    plain = peak_bytes(model, AlgorithmConfig(preset="tis"))
    exact = peak_bytes(model, AlgorithmConfig(preset="vcpo"))
    proxy = peak_bytes(model, AlgorithmConfig(preset="vcpo", baseline_norms="proxy"))
    assert sum(sizes) < plain, "the step's own sum was not counted"
    assert sum(sizes) * 0.9 < exact - plain <= sum(sizes) + max(sizes)
    assert proxy - plain < 0.1 * sum(sizes)
