"""Causal attention with a soft cap on its scores (Gemma 2) or a sink (GPT-OSS), which fused kernels do not compute.

    p = softmax([cap tanh(s q k / cap), sink])      output = sum p v over the keys; the sink only takes probability

In blocks of queries, which are computed again in the backward: memory grows with a block's keys, not with the square of
the length. Independent of packs. Shapes: _S tokens, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCK = 512
"""Queries at a time."""


def capped_attention(
    query_1HSD: Tensor,
    key_1KSD: Tensor,
    value_1KSD: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    cap: float | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """The output of one text's attention. [1, H, S, D of the values]

    Args:
        scaling: s, the factor of the products.
        window: how many tokens a query sees, itself included; None: all before it.
        cap: the largest absolute score.
        sink_H: each head's logit of a place that holds nothing.
    """
    repeats, length = query_1HSD.shape[1] // key_1KSD.shape[1], query_1HSD.shape[2]
    key_1HSD, value_1HSD = (one.repeat_interleave(repeats, dim=1) for one in (key_1KSD, value_1KSD))
    blocks = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        first = 0 if window is None else max(0, start + 1 - window)
        inputs = (query_1HSD[:, :, start:end], key_1HSD[:, :, first:end], value_1HSD[:, :, first:end], sink_H)
        options = (start - first, scaling, window, cap)
        if length > BLOCK and torch.is_grad_enabled():
            blocks.append(checkpoint(_block, *inputs, *options, use_reentrant=False))
        else:
            blocks.append(_block(*inputs, *options))
    return torch.cat(blocks, dim=2)


def _block(
    query_1HBD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    sink_H: Tensor | None,
    num_before: int,
    scaling: float,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """Queries of which the first has `num_before` of the keys before its own."""
    score_1HBT = (query_1HBD @ key_1HTD.transpose(2, 3)).float() * scaling
    if cap is not None:
        score_1HBT = cap * torch.tanh(score_1HBT / cap)
    at_B = torch.arange(query_1HBD.shape[2], device=query_1HBD.device) + num_before
    distance_BT = at_B[:, None] - torch.arange(key_1HTD.shape[2], device=query_1HBD.device)
    is_seen_BT = distance_BT >= 0
    if window is not None:
        is_seen_BT &= distance_BT < window
    score_1HBT = score_1HBT.masked_fill(~is_seen_BT, -torch.inf)
    if sink_H is not None:
        sink_1HB1 = sink_H.float().reshape(1, -1, 1, 1).expand(1, -1, len(at_B), 1)
        score_1HBT = torch.cat([score_1HBT, sink_1HB1], dim=3)
    share_1HBT = score_1HBT.softmax(dim=3)[..., : key_1HTD.shape[2]]
    return share_1HBT.to(value_1HTD.dtype) @ value_1HTD
