"""The policy's tensors under their Hugging Face names, one decoder layer at a time, whole even if ZeRO-3 divided them.

Adapters are merged here, so that receivers get ordinary weights. The interface is that of vLLM's `WeightSource`:
`metadata()` and iteration. Independent of where tensors go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from trainer.lora import Adapter, NamedTensor, base_tensors
from trainer.ranks import gathered, is_divided, whole_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Name, type and shape of a tensor that iteration yields. Making it gathers nothing."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightSource:
    """Parameters and persistent buffers of `module`, in its own order; a tied tensor comes once, under its first name.

    For a `PeftModel` these are the base model's tensors, with W + scale * B A in place of a W that has an adapter; the
    model is not changed. Every rank must iterate to the end, in step with the others: ZeRO-3 gathers a layer on all of
    them and drops it when the next one is requested. A yielded tensor occupies memory as long as it is kept.

    Example::

        source = WeightSource(model, dtype=torch.bfloat16)
        for name, tensor in source:
            print(name, tuple(tensor.shape))
    """

    def __init__(self, module: nn.Module, *, dtype: torch.dtype) -> None:
        """`dtype` is the engine's: floating-point parameters are converted to it, buffers are not."""
        self._dtype = dtype
        self._tensors = list(base_tensors(module))

    def metadata(self) -> list[TensorMeta]:
        """Metadata of the tensors that iteration yields, in the same order."""
        return [
            TensorMeta(
                name=one.name,
                dtype=self._sent_dtype(one.tensor),
                shape=tuple(whole_shape(one.tensor)),
            )
            for one in self._tensors
        ]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors together."""
        return sum(meta.num_bytes for meta in self.metadata())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.keeping(None)

    @torch.no_grad()
    def keeping(
        self, adapters: dict[str, Adapter] | None, frozen: dict[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate, and put copies of the adapters, on the CPU, into `adapters` under their weights' names, and of these
        weights without them into `frozen`.
        """
        for _, layer in groupby(self._tensors, key=lambda one: layer_of(one.name)):
            tensors = list(layer)
            with gathered(part for one in tensors for part in _parts(one)):
                for one in tensors:
                    if adapters is not None and one.adapter is not None:
                        adapters[one.name] = one.adapter.copied()
                    if frozen is not None and one.adapter is not None:
                        frozen[one.name] = one.tensor.detach().to("cpu", self._sent_dtype(one.tensor), copy=True)
                    whole = one.tensor if one.adapter is None else one.adapter.merged(one.tensor)
                    yield one.name, whole.detach().to(self._sent_dtype(one.tensor))

    @property
    def is_split(self) -> bool:
        """Whether ZeRO-3 divided the tensors among ranks."""
        return any(is_divided(one.tensor) for one in self._tensors)

    @property
    def is_adapted(self) -> bool:
        """Whether adapters are all that changes."""
        return any(one.adapter is not None for one in self._tensors)

    def take_part(self) -> None:
        """Iterate on a rank that does not use the tensors, so that the others can gather."""
        for _ in self:
            pass

    def _sent_dtype(self, tensor: Tensor) -> torch.dtype:
        is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        return self._dtype if is_weight else tensor.dtype


def layer_of(name: str) -> str:
    """The decoder layer that a tensor belongs to; its own name if it belongs to none, such as embedding and head.

    >>> layer_of("model.layers.3.mlp.up_proj.weight")
    'model.layers.3'
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: at + 1])
    return name


def _parts(one: NamedTensor) -> tuple[Tensor, ...]:
    return (one.tensor,) if one.adapter is None else (one.tensor, one.adapter.down_RI, one.adapter.up_OR)
