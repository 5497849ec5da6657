"""Packed attention against dense masks, and what it refuses."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from agentrl.errors import ConfigError
from tests.trainer.trainer_builders import architecture, uneven_episodes
from trainer.gradient import attention
from trainer.gradient.attention import Kernel, choose
from trainer.gradient.logprobs import score
from trainer.packing import action_tensors, join

CPU = torch.device("cpu")


def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return attention._attend(nn.Identity(), query, key, value, None, **arguments)[0]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([None, 1, 3]))
def test_equals_attention_under_a_dense_block_mask(lengths: list[int], window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    size = sum(lengths)
    # float64: kernels of different processors differ by 1e-15, and a token of another segment by 1e-2.
    query = torch.randn(1, 4, size, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, size, 8, generator=generator, dtype=torch.float64)
    segment_S = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance_SS = torch.arange(size)[:, None] - torch.arange(size)
    mask = (segment_S[:, None] == segment_S) & (distance_SS >= 0) & (distance_SS < (window or size))
    theirs = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    bounds = (0, *torch.tensor(lengths).cumsum(0).tolist())
    ours = packed(query, key, value, segment_bounds=bounds, sliding_window=window)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_without_bounds_each_row_is_one_segment() -> None:
    query, key, value = torch.randn(3, 2, 2, 5, 8)
    theirs = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(packed(query, key, value), theirs)


@pytest.mark.parametrize("other", [{"position_bias": 1.0}, {"dropout": 0.1}])
def test_what_it_does_not_do_is_refused(other: dict[str, float]) -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    with pytest.raises(ConfigError, match="Identity"):
        packed(query, key, value, **other)


def test_another_episode_in_the_pack_changes_nothing() -> None:
    model = architecture("Qwen3").double()  # logits differ by 1e-14, so only their rounding to float32 is left: one ulp
    attention.install(model)
    first, *others = (action_tensors(one, CPU) for one in uneven_episodes())
    alone = score(model, join([first])).logprob_N
    for neighbours in ([others[0]], [others[2], others[1]]):
        together = score(model, join([first, *neighbours])).logprob_N[: len(alone)]
        torch.testing.assert_close(together, alone, rtol=0, atol=5e-7)


A_GPU = {
    "device_type": "cuda",
    "dtype": torch.bfloat16,
    "head_size": 128,
    "capability": (9, 0),
    "has_varlen": True,
    "has_flash": True,
}


@pytest.mark.parametrize(
    ("facts", "kernel", "reason"),
    [
        ({}, Kernel.VARLEN, ""),
        ({"has_varlen": False}, Kernel.FLASH, ""),
        ({"has_varlen": False, "has_flash": False}, Kernel.LOOP, "flash_attn is not installed"),
        ({"dtype": torch.float32}, Kernel.LOOP, "half precision only, the model is float32"),
        ({"head_size": 288}, Kernel.LOOP, "not 288"),
        ({"capability": (7, 5)}, Kernel.LOOP, "the GPU has 7.5"),
        ({"device_type": "cpu", "capability": None}, Kernel.LOOP, ""),
    ],
)
def test_the_fastest_exact_kernel_is_chosen_and_a_slower_one_explained(
    facts: dict[str, Any], kernel: Kernel, reason: str
) -> None:
    chosen, why = choose(**(A_GPU | facts))
    assert chosen is kernel and why.endswith(reason) and bool(why) == bool(reason)


def test_a_device_that_nothing_was_made_for_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'mps'"):
        choose(**(A_GPU | {"device_type": "mps", "capability": None}))


def test_the_log_says_what_was_chosen(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trainer.gradient.attention"):
        attention.install(architecture("Llama"))
    assert caplog.messages == [f"attention of packs: {Kernel.LOOP}"]


@pytest.mark.parametrize("window", [None, 3])
def test_varlen_attention_takes_what_it_is_given(window: int | None) -> None:
    """Checks the call against the shape rules of the installed torch, on meta tensors without a GPU."""
    query, key = torch.empty(9, 4, 16, dtype=torch.bfloat16, device="meta"), torch.empty(9, 2, 16, device="meta").half()
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    window_size = (-1 if window is None else window - 1, 0)
    out = attention._varlen(query, key, key, bounds=bounds, longest=5, scaling=0.5, window=window_size)
    assert out.shape == query.shape and out.dtype is torch.bfloat16


def _needs(kernel: Kernel) -> None:
    if kernel is Kernel.FLASH and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash_attn is not installed")
    if torch.cuda.get_device_capability() < attention.FLASH_CAPABILITY:
        pytest.skip("flash kernels need compute capability 8.0")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kernel", [Kernel.VARLEN, Kernel.FLASH])
def test_a_gpus_kernel_equals_the_loop_forward_and_backward(kernel: Kernel, window: int | None) -> None:
    """In bfloat16 within 2 % (relative L2) of the loop in float32 over the same rounded numbers."""
    _needs(kernel)
    torch.manual_seed(0)
    lengths = [1, 130, 17, 64, 3]
    bounds = (0, *torch.tensor(lengths).cumsum(0).tolist())
    shapes = [(1, 4, bounds[-1], 64), (1, 2, bounds[-1], 64), (1, 2, bounds[-1], 64)]
    halves = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    wholes = [tensor.detach().float().requires_grad_() for tensor in halves]
    arguments = {"scaling": 0.1, "window": (-1 if window is None else window - 1, 0)}
    ours = attention._KERNELS[kernel](
        *(tensor[0].transpose(0, 1) for tensor in halves),
        bounds=torch.tensor(bounds, dtype=torch.int32, device="cuda"),
        longest=max(lengths),
        **arguments,
    )
    theirs = packed(*wholes, segment_bounds=bounds, scaling=0.1, sliding_window=window)[0]
    seed = torch.randn_like(theirs)
    pairs = [(ours, theirs)]
    pairs += zip(
        torch.autograd.grad(ours, halves, seed.bfloat16()), torch.autograd.grad(theirs, wholes, seed), strict=True
    )
    for half, whole in pairs:
        assert float((half.float() - whole).norm() / whole.norm()) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=str)
def test_packed_episodes_on_a_gpu_score_as_alone(dtype: torch.dtype, bound: float) -> None:
    model = architecture("Qwen3").to("cuda", dtype)
    attention.install(model)
    members = [action_tensors(one, model.device) for one in uneven_episodes()]
    alone = torch.cat([score(model, join([member])).logprob_N for member in members])
    torch.testing.assert_close(score(model, join(members)).logprob_N, alone, rtol=0, atol=bound)
