"""The memory that the start-up proof and exact norms take, counted allocation by allocation."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from agentrl.config import AlgorithmConfig
from agentrl.testing import group
from tests.trainer.trainer_builders import architecture, episode
from trainer import startup_proof
from trainer.gradient import attention
from trainer.gradient.step_gradient import Estimator


class Live:
    """Measures the peak number of bytes that are allocated inside the block and not yet freed, by torch's profiler."""

    peak = 0

    def __enter__(self) -> Live:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        events = self._profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        self.peak = max(accumulate(num_bytes for _, num_bytes in changes))


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


def small_qwen2() -> Any:
    """A small Qwen2 none of whose weights dominates, as in a large one. bfloat16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=500, num_hidden_layers=6, tie_word_embeddings=True, **sizes))
    return model.to(torch.bfloat16).eval()


def test_the_startup_proof_takes_a_float32_sum_of_half_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """And their own gradients, of a few weights at a time."""
    model = small_qwen2()
    part = sum(parameter.numel() for parameter in model.parameters()) // 2
    monkeypatch.setattr(startup_proof, "PART_ELEMENTS", part)
    with Live() as live:
        startup_proof.prepare(model)
    assert 0.9 * 4 * part < live.peak, "the sum was not counted"
    assert live.peak < 1.3 * 4 * part
    assert all(parameter.grad is None for parameter in model.parameters())
