"""vLLM's NCCL transfer without a GPU: its communicator over our gloo group, and CUDA streams that do nothing.

Everything else of vLLM's transfer is its own: rendezvous, packing, buffers, loading. `abort` ends a waiting broadcast
without an error and without data, as `ncclCommAbort` lets a kernel end; later broadcasts pass at once.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

from agentrl.engine.vllm.gloo_group import Deadline, Group

LONGEST_S = 60.0  # of a broadcast that nobody aborts; NCCL itself has no limit

_kept = ExitStack()


class FakeCommunicator:
    """In place of `PyNcclCommunicator`: rank 0 sends."""

    def __init__(self, group: Any, device: Any) -> None:
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.disabled = False
        self._aborted = threading.Event()
        assert group.broadcast_obj("unique id" if self.rank == 0 else None, src=0) == "unique id"
        store: Any = distributed.PrefixStore("nccl", group.store)  # type: ignore[attr-defined]
        self._gloo = Group(store, rank=self.rank, world_size=self.world_size, address="127.0.0.1", timeout_s=LONGEST_S)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        if self.disabled:
            return
        errors: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                self._gloo.broadcast(tensor, Deadline(LONGEST_S))
            except BaseException as error:
                if "gone" in str(error):  # NCCL may not notice a peer that is gone, and then waits for it
                    self._aborted.wait(LONGEST_S)
                errors.append(error)
            finally:
                done.set()

        threading.Thread(target=run, daemon=True).start()
        while not done.wait(0.01):
            if self._aborted.is_set():
                return
        if errors and not self._aborted.is_set():
            raise errors[0]

    def destroy(self) -> None:
        self.disabled = True
        self._aborted.set()
        self._gloo.close()


class FakeStream:
    """A CUDA stream whose work is always done."""

    def __init__(self, device: Any = None) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def installed() -> Iterator[None]:
    """For the length of the block, in this process."""
    from vllm.distributed.weight_transfer import packed_tensor

    replaced = {
        "vllm.distributed.device_communicators.pynccl.PyNcclCommunicator": FakeCommunicator,
        "torch.accelerator.current_device_index": lambda: 0,
        "torch.accelerator.synchronize": lambda: None,
        "torch.cuda.Stream": FakeStream,
        "torch.cuda.current_stream": FakeStream,
        "torch.cuda.stream": lambda stream: nullcontext(),
    }
    patches = [mock.patch(name, value) for name, value in replaced.items()]
    packed_tensor._get_streams.cache_clear()
    try:
        for patch in patches:
            patch.start()
        yield
    finally:
        for patch in patches:
            patch.stop()
        packed_tensor._get_streams.cache_clear()


def plugin() -> None:
    """The entry point of `vllm.general_plugins` that puts this into a server for the length of its life."""
    if torch.cuda.is_available():
        raise RuntimeError("this machine has a GPU: nothing needs to be pretended")
    _kept.enter_context(installed())
    atexit.register(_kept.close)
