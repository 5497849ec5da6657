"""Counts the tensors that are alive, the floating-point operations and the memory traffic of code that runs inside.

Works on real tensors and on tensors of the meta device, which have shapes and no content. Independent of models.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_PRODUCTS = frozenset(
    (aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm)
)  # their last two tensors are multiplied
_ATTENTION = {"_varlen_attn": 2.0, "_varlen_attn_backward": 5.0}
"""Products of [S, D] with [D, S] or alike, of which causality halves each; torch's own names."""


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors that are made inside the block; those made before do not count.

    `device_type` says where: on "meta", a number that the host reads is 0.

    Example::

        with Counter("cpu") as counter:
            torch.ones(1000).square().sum()
        counter.peak_bytes  # 8,004
    """

    def __init__(self, device_type: str, *, known: Iterable[Tensor] = (), attention_flop: float = 0.0) -> None:
        """`known` are tensors made before; `attention_flop` is that of one causal product of queries and keys."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = self.now_bytes = 0
        self.matrix_flop = self.moved_bytes = 0.0
        self._device_type = device_type
        self._attention_flop = attention_flop
        self._alive: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._device_type == "meta" and func is aten._local_scalar_dense.default:
            return 0
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            if tensor.device.type == self._device_type:
                self._count(tensor.untyped_storage())
        if not func.is_view:
            self._work(func, args, made)
        return made

    def start_phase(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.now_bytes

    def _work(self, func: Any, args: Any, made: Any) -> None:
        name = func._schema.name.rpartition("::")[2]
        if func.overloadpacket in _PRODUCTS:
            left, right = [one for one in args if isinstance(one, Tensor)][-2:]
            self.matrix_flop += 2 * left.numel() * right.shape[-1]
        elif name in _ATTENTION:
            self.matrix_flop += _ATTENTION[name] * self._attention_flop
        else:
            self.moved_bytes += sum(tensor.nbytes for tensor in (*_tensors(args), *_tensors(made)))

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = weakref.finalize(storage, self._forget, key, storage.nbytes())
            self.now_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        del self._alive[key]
        self.now_bytes -= num_bytes


def _tensors(values: Any) -> Iterator[Tensor]:
    for one in values if isinstance(values, tuple | list) else [values]:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list):
            yield from (tensor for tensor in one if isinstance(tensor, Tensor))
