"""Ends what NCCL alone would wait for forever: a peer that does not join, and a broadcast whose other end is gone.

The sender listens at a TCP store (over NCCL one of its own, beside vLLM's). Receivers look there whether the update was
called off; a store that is gone means the same. Independent of weights and of vLLM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from agentrl.engine.vllm.gloo_group import GroupError, listen, meet

POLL_S = 0.2
JOINED, OVER = "joined", "over"
GONE = "the sender is gone, or has called it off"


class Watch:
    """One group's watch store, on either side.

    Example:
        watch = Watch.of_sender("10.0.0.5", world_size=3, timeout_s=60)  # on the sender
        watch = Watch.of_receiver("10.0.0.5", port, world_size=3, timeout_s=60)  # on both receivers
        watch.meet()  # on all three
    """

    def __init__(self, store: Any, *, world_size: int, timeout_s: float, is_sender: bool) -> None:
        self._store = store
        self._num_receivers = world_size - 1
        self._timeout_s = timeout_s
        self._is_sender = is_sender

    @classmethod
    def of_sender(cls, address: str, *, world_size: int, timeout_s: float) -> Self:
        """Listens at a free port of `address`. Raises OSError."""
        store = listen(address, 0, world_size=world_size, timeout_s=timeout_s)
        return cls(store, world_size=world_size, timeout_s=timeout_s, is_sender=True)

    @classmethod
    def of_receiver(cls, address: str, port: int, *, world_size: int, timeout_s: float) -> Self:
        """Connects to the sender's. Raises GroupError past the deadline."""
        store = meet(address, port, world_size=world_size, timeout_s=timeout_s)
        return cls(store, world_size=world_size, timeout_s=timeout_s, is_sender=False)

    @property
    def port(self) -> int:
        """Where the sender listens."""
        return int(self._store.port)

    def meet(self) -> None:
        """Return once all receivers have come. Raises GroupError past the deadline, or when the sender called it
        off."""
        deadline_s = time.monotonic() + self._timeout_s
        try:
            num_here = self._store.add(JOINED, 0 if self._is_sender else 1)
            while num_here < self._num_receivers:
                if self.is_over:
                    raise GroupError(GONE)
                if time.monotonic() > deadline_s:
                    raise GroupError(f"{num_here} of {self._num_receivers} workers joined within {self._timeout_s:g} s")
                time.sleep(POLL_S / 10)
                num_here = self._store.add(JOINED, 0)
        except GroupError:
            raise
        except RuntimeError as error:  # torch's errors of a broken connection
            raise GroupError("the sender is gone") from error

    def call_off(self) -> None:
        """On the sender: end the update on every receiver."""
        self._store.set(OVER, b"1")

    @property
    def is_over(self) -> bool:
        """Whether the sender has called it off or is gone."""
        try:
            return bool(self._store.check([OVER]))
        except RuntimeError:
            return True

    def joined(self, join: Callable[[], object], device: torch.device) -> None:
        """Run `join` in a thread, with `device` current. Raises its error, or GroupError past the deadline, or when the
        sender is gone or calls it off.

        The thread is abandoned then: NCCL cannot be told to stop joining.
        """
        errors: list[BaseException] = []

        def run() -> None:
            try:
                if device.type != "cpu":
                    torch.accelerator.set_device_index(device.index)  # a new thread uses the first device
                join()
            except BaseException as error:
                errors.append(error)

        deadline_s = time.monotonic() + self._timeout_s
        thread = threading.Thread(target=run, daemon=True, name="joining the learner's group")
        thread.start()
        thread.join(POLL_S)
        while thread.is_alive():
            if self.is_over:
                raise GroupError(GONE)
            if time.monotonic() > deadline_s:
                raise GroupError(f"the learner's group was not complete within {self._timeout_s:g} s")
            thread.join(POLL_S)
        if errors:
            raise errors[0]

    @contextmanager
    def guard(self, abort: Callable[[], object]) -> Iterator[None]:
        """Call `abort` from a thread, and raise GroupError, if the block is not left within the deadline, or the sender
        is gone or calls it off. `abort` must make the block return or raise.
        """
        is_left, reasons = threading.Event(), list[str]()

        def end(reason: str) -> None:
            reasons.append(reason)
            abort()

        def poll() -> None:
            while not is_left.wait(POLL_S):
                if self.is_over:
                    return end(GONE)

        late = threading.Timer(self._timeout_s, end, [f"the weights were not transferred within {self._timeout_s:g} s"])
        for thread in (late, threading.Thread(target=poll, name="watch of a weight update")):
            thread.daemon = True
            thread.start()
        try:
            yield
        except Exception as error:
            if reasons:
                raise GroupError(reasons[0]) from error
            raise
        finally:
            is_left.set()
            late.cancel()
        if reasons:  # an aborted communicator lets later broadcasts pass without any data
            raise GroupError(reasons[0])
