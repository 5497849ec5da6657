"""The policy's tensors under Hugging Face's names, one decoder layer at a time, whole even where ZeRO-3 split them.

Adapters are merged on the way out: nobody further down knows of them. The two channels are those of vLLM's
`WeightSource`: `metadata()` and iteration. Knows nothing of where tensors go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from trainer.lora import Adapter, NamedTensor, base_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """What iteration will yield, known without gathering anything."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightSource:
    """Parameters and persistent buffers of `module`, in its own order; what is tied comes once, under its first name.

    Of a `PeftModel` come the base model's tensors, with W + scale * B A for a W with an adapter; none is changed. Every
    rank must iterate to the end, in step with the others: ZeRO-3 gathers a layer on all of them and
    drops it when the next is asked for. Whoever keeps a yielded tensor keeps its memory.
    """

    def __init__(self, module: nn.Module, *, dtype: torch.dtype) -> None:
        """`dtype`: of the engine. Floating parameters are sent in it; buffers as they are."""
        self._dtype = dtype
        self._tensors = list(base_tensors(module))

    def metadata(self) -> list[TensorMeta]:
        """Element for element what iteration yields."""
        return [
            TensorMeta(
                name=one.name,
                dtype=self._wire_dtype(one.tensor),
                shape=tuple(getattr(one.tensor, "ds_shape", one.tensor.shape)),
            )
            for one in self._tensors
        ]

    @property
    def num_bytes(self) -> int:
        """Of one whole pass."""
        return sum(meta.num_bytes for meta in self.metadata())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.keeping(None)

    @torch.no_grad()
    def keeping(self, adapters: dict[str, Adapter] | None) -> Iterator[tuple[str, Tensor]]:
        """The same pass; copies of the adapters, on the CPU, are left in `adapters` under their weights' names."""
        for _, layer in groupby(self._tensors, key=lambda one: layer_of(one.name)):
            tensors = list(layer)
            with _gathered([part for one in tensors for part in _parts(one)]):
                for one in tensors:
                    if adapters is not None and one.adapter is not None:
                        adapters[one.name] = one.adapter.copied()
                    whole = one.tensor if one.adapter is None else one.adapter.merged(one.tensor)
                    yield one.name, whole.detach().to(self._wire_dtype(one.tensor))

    @property
    def is_split(self) -> bool:
        """Whether ZeRO-3 divided the tensors among ranks."""
        return any(hasattr(one.tensor, "ds_shape") for one in self._tensors)

    def take_part(self) -> None:
        """One pass on a rank that has no use for the tensors itself."""
        for _ in self:
            pass

    def _wire_dtype(self, tensor: Tensor) -> torch.dtype:
        is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        return self._dtype if is_weight else tensor.dtype


def layer_of(name: str) -> str:
    """The decoder layer of a name, `model.layers.3`; the name itself for what lies in none, as embedding and head."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: at + 1])
    return name


def _parts(one: NamedTensor) -> tuple[Tensor, ...]:
    return (one.tensor,) if one.adapter is None else (one.tensor, one.adapter.down_RI, one.adapter.up_OR)


def _gathered(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    if not (split := [tensor for tensor in tensors if hasattr(tensor, "ds_shape")]):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(split, modifier_rank=None)
    return context
