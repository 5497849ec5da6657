"""Causal attention within each segment of a pack, registered as an attention implementation of transformers.

On CPUs it is a loop of ordinary causal attention over the segments, the same work as for separate trajectories. On GPUs
it is one call with the segments' bounds: torch's varlen attention, else that of flash-attn, else the loop. Independent
of what segments are.

Shapes: _S tokens of a pack, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.errors import ConfigError
from trainer import ranks
from trainer.gradient import sequence
from trainer.gradient.capped_attention import capped_attention

log = logging.getLogger(__name__)

NAME = "agentrl_packed"
HALF = (torch.bfloat16, torch.float16)
LARGEST_FLASH_HEAD = 256
FLASH_CAPABILITY = (8, 0)  # Ampere
# Arguments by which some architectures change attention. None of them is supported here.
_UNKNOWN = ("position_bias", "cache")
# Layers whose only exchange between tokens is attention as computed here.
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Their frequencies depend on the longest text of a call, so a long segment would change every short one of its pack.
_MOVING_ROPES = ("dynamic", "longrope")


class Kernel(StrEnum):
    """The implementations of a pack's attention."""

    LOOP = "scaled_dot_product_attention, segment by segment"
    VARLEN = "torch.nn.attention.varlen.varlen_attn"
    FLASH = "flash_attn.flash_attn_varlen_func"


def choose(
    *,
    device_type: str,
    dtype: torch.dtype,
    head_size: int,
    capability: tuple[int, int] | None,
    has_varlen: bool,
    has_flash: bool,
) -> tuple[Kernel, str]:
    """The fastest exact kernel, and why no faster one is used ("" where there is none).

    `capability` is the GPU's compute capability. Raises ConfigError for an unsupported device.
    """
    if device_type == "cpu":
        return Kernel.LOOP, ""
    if device_type != "cuda" or capability is None:
        raise ConfigError(f"attention over packs supports CPUs and CUDA GPUs, not the device {device_type!r}")
    if dtype not in HALF:
        return Kernel.LOOP, f"flash kernels take half precision only, the model is {str(dtype).removeprefix('torch.')}"
    if head_size > LARGEST_FLASH_HEAD or head_size % 8:
        return Kernel.LOOP, f"flash kernels take heads of multiples of 8 up to {LARGEST_FLASH_HEAD}, not {head_size}"
    if capability < FLASH_CAPABILITY:
        return Kernel.LOOP, f"flash kernels need compute capability 8.0, the GPU has {capability[0]}.{capability[1]}"
    if has_varlen:
        return Kernel.VARLEN, ""
    if has_flash:
        return Kernel.FLASH, ""
    return Kernel.LOOP, "this torch has no varlen_attn and flash_attn is not installed"


def install(model: Any) -> None:
    """Make every layer of `model` use this attention.

    Raises ConfigError if the architecture does not support it, or if its positions would depend on other segments.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    check_positions(model)
    sequence.check_heads(model.config)
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise ConfigError(
            f"{type(model).__name__} does not support another attention implementation: {error}"
        ) from error
    kernel, reason = _chosen(model.device, model.dtype, head_size(model.config))
    log.info("attention of packs: %s%s", kernel, f" ({reason})" if reason else "")


def check_layers(model: Any) -> None:
    """Raise ConfigError if a layer passes something from token to token besides attention, or sees chunks of a text."""
    others = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _KNOWN_LAYERS
    if others:
        raise ConfigError(f"{type(model).__name__} has layers of type {', '.join(sorted(others))}")


def is_installed(model: Any) -> bool:
    """Whether packs of several segments may be given to this model."""
    return bool(model.config._attn_implementation == NAME)


def choose_own(model: Any, name: str) -> bool:
    """Let the model use another of its attention implementations; False where it has none of that name."""
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError):
        return False
    return True


def segment_arguments(bounds: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Keyword arguments of the model's call for segments at `bounds`; add position ids and `use_cache=False`."""
    arguments: dict[str, Any] = {"segment_bounds": tuple(bounds)}
    if device.type != "cpu":
        arguments["segment_bounds_on_device"] = torch.tensor(bounds, dtype=torch.int32, device=device)
    return arguments


def check_positions(model: Any) -> None:
    """Raise ConfigError if positions would depend on other segments of a pack.

    Rotary modules of transformers have a `rope_type`: one name, or one per kind of layer.
    """
    for name, module in model.named_modules():
        rope_type = getattr(module, "rope_type", "")
        for one in rope_type.values() if isinstance(rope_type, dict) else (rope_type,):
            if any(moving in one for moving in _MOVING_ROPES):
                raise ConfigError(
                    f"{type(module).__name__} ({name}): rope_type {one!r} takes its frequencies from the longest text "
                    "of a call, so log-probabilities would depend on which episodes share a pack; use a model with "
                    "rope_type default, linear, llama3 or yarn. (dynamic equals default up to "
                    "max_position_embeddings: if no episode is longer, set rope_type to default in config.json)"
                )


def head_size(config: Any) -> int:
    """Width of one attention head, from transformers' config of a model."""
    config = config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@lru_cache(maxsize=16)
def _chosen(device: torch.device, dtype: torch.dtype, head_size: int) -> tuple[Kernel, str]:
    is_cuda, is_planned = device.type == "cuda", device.type == "meta"
    return choose(
        device_type="cuda" if is_planned else device.type,
        dtype=dtype,
        head_size=head_size,
        capability=torch.cuda.get_device_capability(device) if is_cuda else FLASH_CAPABILITY if is_planned else None,
        has_varlen=importlib.util.find_spec("torch.nn.attention.varlen") is not None,
        has_flash=is_cuda and importlib.util.find_spec("flash_attn") is not None,
    )


def _no_mask(**_: Any) -> None:
    """No mask: the bounds of segments replace it. transformers would otherwise build one from the position ids."""
    return None


def _attend(
    module: nn.Module,
    query_1HSD: Tensor,
    key_1KSD: Tensor,
    value_1KSD: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> Any:
    """The attention interface of transformers: over a whole pack, also where ranks divide its tokens."""
    if ranks.sequence_count() == 1 or others.get("segment_bounds") is None:
        return _attend_whole(module, query_1HSD, key_1KSD, value_1KSD, attention_mask, **others)
    return sequence.attend(_attend_whole, module, query_1HSD, key_1KSD, value_1KSD, **others)


def _attend_whole(
    module: nn.Module,
    query_1HSD: Tensor,
    key_1KSD: Tensor,
    value_1KSD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    segment_bounds: tuple[int, ...] | None = None,
    segment_bounds_on_device: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Without bounds, every row of the batch is one segment. `s_aux` are the heads' sinks."""
    if attention_mask is not None or dropout or any(others.get(name) is not None for name in _UNKNOWN):
        raise ConfigError(f"{type(module).__name__} needs an attention feature that packed attention does not support")
    if sliding_window is None and getattr(module, "sliding_window", None) is not None:
        raise ConfigError(f"{type(module).__name__} has a sliding window of which packed attention is not told")
    scaling = query_1HSD.shape[3] ** -0.5 if scaling is None else scaling
    has_kernel = softcap is None and s_aux is None and value_1KSD.shape[3] == query_1HSD.shape[3]
    if has_kernel and segment_bounds_on_device is not None and segment_bounds is not None:
        kernel, _ = _chosen(query_1HSD.device, query_1HSD.dtype, query_1HSD.shape[3])
        if kernel is not Kernel.LOOP:
            out_SHD = _KERNELS[kernel](
                *(tensor[0].transpose(0, 1) for tensor in (query_1HSD, key_1KSD, value_1KSD)),
                bounds=segment_bounds_on_device,
                longest=max(end - start for start, end in itertools.pairwise(segment_bounds)),
                scaling=scaling,
                # In flash's terms: how many tokens before the query's own, and how many after it.
                window=(-1 if sliding_window is None else sliding_window - 1, 0),
            )
            return out_SHD[None], None
    bounds = segment_bounds or (0, query_1HSD.shape[2])
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    parts = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query_1HSD, key_1KSD, value_1KSD)), strict=True)
    if softcap is None and s_aux is None:
        out = [_causal(*part, scaling=scaling, sliding_window=sliding_window) for part in parts]
    else:
        out = [
            capped_attention(*part, scaling=scaling, window=sliding_window, cap=softcap, sink_H=s_aux) for part in parts
        ]
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


def _causal(query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, sliding_window: int | None) -> Tensor:
    length = query.shape[2]
    mask = None
    if sliding_window is not None and length > sliding_window:
        position_S = torch.arange(length, device=query.device)
        distance_SS = position_S[:, None] - position_S
        mask = (distance_SS >= 0) & (distance_SS < sliding_window)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _varlen(
    query_SHD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    *,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    window: tuple[int, int],
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out_SHD = varlen_attn(
        query_SHD,
        key_SKD,
        value_SKD,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=window,
        enable_gqa=query_SHD.shape[1] != key_SKD.shape[1],
    )
    assert isinstance(out_SHD, Tensor)
    return out_SHD


def _flash(
    query_SHD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    *,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    window: tuple[int, int],
) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    out_SHD: Tensor = flash_attn_varlen_func(
        query_SHD,
        key_SKD,
        value_SKD,
        bounds,
        bounds,
        longest,
        longest,
        softmax_scale=scaling,
        causal=True,
        window_size=window,
    )
    return out_SHD


_KERNELS = {Kernel.VARLEN: _varlen, Kernel.FLASH: _flash}
