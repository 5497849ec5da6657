"""A process group of one sender and its receivers over gloo, separate from torch's default group. Used by both sides.

Every wait has a deadline. A group that failed cannot be used again. Independent of weights and of vLLM.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

SENDER = 0
_c10d: Any = distributed  # torch's type stubs do not show its stores and process groups


def listen(address: str, port: int, *, world_size: int, timeout_s: float) -> Any:
    """The sender's store, which listens on `address` only; port 0 takes a free one, see `.port`. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen()
        port = sock.getsockname()[1]
        return _c10d.TCPStore(
            address,
            port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=sock.detach(),
        )


def meet(address: str, port: int, *, world_size: int, timeout_s: float) -> Any:
    """The receivers' connection to the sender's store. Raises GroupError past the deadline."""
    try:
        return _c10d.TCPStore(
            address, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except RuntimeError as error:
        raise GroupError(f"the learner cannot be reached at {address}:{port}: {_short(error)}") from error


def own_address(towards: str, port: int = 9) -> str:
    """This machine's address on the route to `towards`; sends nothing. Raises OSError when there is no route."""
    family, kind, proto, _, target = socket.getaddrinfo(towards, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as sock:
        sock.connect(target)
        return str(sock.getsockname()[0])


class GroupError(RuntimeError):
    """The other side is gone, or the deadline passed. The group cannot be used again. Example: a killed learner."""


class Deadline:
    """A moment `timeout_s` from now. Example: one for all tensors of an update: `group.broadcast(tensor, deadline)`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._at_s = time.monotonic() + timeout_s

    def left(self) -> timedelta:
        """The time that remains. Raises GroupError when none does."""
        if (left_s := self._at_s - time.monotonic()) <= 0:
            raise GroupError(f"the weights were not transferred within {self._timeout_s:g} s")
        return timedelta(seconds=left_s)


class Group:
    """Rank 0 sends, all others receive. The constructor waits until all `world_size` processes have joined.

    Example:
        group = Group(store, rank=0, world_size=2, address="127.0.0.1", timeout_s=60)
        group.broadcast(tensor, Deadline(60))
    """

    def __init__(self, store: Any, *, rank: int, world_size: int, address: str, timeout_s: float) -> None:
        """`address` is that of this process. Raises GroupError when not all joined within `timeout_s`."""
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._gloo: Any = _c10d.ProcessGroupGloo(
                _c10d.PrefixStore("agentrl_weights", store), rank, world_size, options
            )
        except RuntimeError as error:
            raise GroupError(
                f"not all {world_size} processes joined within {timeout_s:g} s: {_short(error)}"
            ) from error

    def broadcast(self, tensor: Tensor, deadline: Deadline) -> None:
        """Copy the sender's `tensor` into those of the receivers: contiguous, in host memory, of the same size.

        Raises GroupError when a process is gone or has left, or the deadline passes.
        """
        data = tensor.detach().reshape(-1).view(torch.uint8)  # gloo does not support every dtype
        if len(data) == 0:
            return
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = SENDER, 0, deadline.left()
        if self._gloo is None:
            raise GroupError("the group is closed")
        try:
            self._gloo.broadcast([data], options).wait()
        except RuntimeError as error:
            raise GroupError(f"the other side is gone, or too slow: {_short(error)}") from error

    def close(self) -> None:
        """Leave the group: processes that wait for this one fail at once. A broadcast that waits here keeps its
        deadline."""
        self._gloo = None  # the connections close with the last reference


def _short(error: RuntimeError) -> str:
    """The message without the position in torch's sources."""
    return str(error).splitlines()[0].removeprefix("[").partition("] ")[2] or str(error)
