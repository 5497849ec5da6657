"""vLLM's CUDA IPC transfer without a GPU: handles of shared host memory in the place of handles of GPU memory.

Everything else of vLLM's transfer is its own: what is sent, how it is packed, how it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

UUID = "GPU-of-host-memory"
DEVICE_INDEX_AT = 6  # in the arguments of torch's `rebuild_cuda_tensor`


def reduce_tensor(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """In place of torch's for CUDA: no copy, if the memory is shared already."""
    storage: Any = tensor.untyped_storage()
    storage._share_filename_cpu_()
    manager, handle, size = storage._share_filename_cpu_()
    layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    arguments = (*layout, (manager, handle, size), None, 0)
    assert arguments[DEVICE_INDEX_AT] == 0
    return rebuild_tensor, arguments


def rebuild_tensor(shape: Any, stride: Any, offset: int, dtype: Any, where: Any, _: Any, device_index: Any) -> Tensor:
    """In place of `rebuild_cuda_tensor`: the sender's own memory."""
    storage: Any = torch.UntypedStorage._new_shared_filename_cpu(*where)  # type: ignore[attr-defined]
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


@contextmanager
def installed() -> Iterator[None]:
    """For the length of the block, in this process."""
    replaced = {
        "vllm.distributed.weight_transfer.ipc_engine.reduce_tensor": reduce_tensor,
        "vllm.distributed.weight_transfer.ipc_engine.rebuild_cuda_tensor": rebuild_tensor,
        "torch.cuda.get_device_properties": lambda index: SimpleNamespace(uuid=UUID),
        "torch.cuda.ipc_collect": lambda: None,
        "torch.accelerator.current_device_index": lambda: 0,
        "torch.accelerator.synchronize": lambda: None,
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        yield
