"""The packed attention against dense masks, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trainer_builders import architecture, uneven_episodes

from agentrl.errors import ConfigError
from trainer import attention
from trainer.logprobs import score
from trainer.packing import action_tensors, join

CPU = torch.device("cpu")


def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return attention._attend(nn.Identity(), query, key, value, None, **arguments)[0]


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([None, 1, 3]))
def test_equals_attention_under_a_dense_block_mask(lengths: list[int], window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    size = sum(lengths)
    query = torch.randn(1, 4, size, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, size, 8, generator=generator)
    segment_S = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance_SS = torch.arange(size)[:, None] - torch.arange(size)
    mask = (segment_S[:, None] == segment_S) & (distance_SS >= 0) & (distance_SS < (window or size))
    theirs = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    bounds = (0, *torch.tensor(lengths).cumsum(0).tolist())
    ours = packed(query, key, value, segment_bounds=bounds, sliding_window=window)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_without_bounds_each_row_is_one_segment() -> None:
    query, key, value = torch.randn(3, 2, 2, 5, 8)
    theirs = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(packed(query, key, value), theirs)


@pytest.mark.parametrize("other", [{"softcap": 30.0}, {"dropout": 0.1}])
def test_what_it_does_not_do_is_refused(other: dict[str, float]) -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    with pytest.raises(ConfigError, match="Identity"):
        packed(query, key, value, **other)


def test_another_episode_in_the_pack_changes_nothing() -> None:
    model = architecture("Qwen3")
    attention.install(model)
    first, *others = (action_tensors(one, CPU) for one in uneven_episodes())
    alone = score(model, join([first])).logprob_N
    for neighbours in ([others[0]], [others[2], others[1]]):
        together = score(model, join([first, *neighbours])).logprob_N[: len(alone)]
        torch.testing.assert_close(together, alone, rtol=0, atol=2e-6)
