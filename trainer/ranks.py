"""The learner's processes among themselves: joining, and gathering small records. Knows nothing of training."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """For an entry point started without a launcher: one rank. A launcher's own variables stay as they are."""
    for name, value in ALONE.items():
        environment.setdefault(name, value)
    if not torch.cuda.is_available():
        environment.setdefault("DS_ACCELERATOR", "cpu")


def join(*, timeout_s: float) -> torch.device:
    """Join the process group of torchrun or the DeepSpeed launcher (alone without one) and return this rank's device.

    Joining twice is safe. NCCL between GPUs, gloo between CPUs.
    """
    has_gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        backend, timeout = "nccl" if has_gpu else "gloo", timedelta(seconds=timeout_s)
        if int(os.environ["WORLD_SIZE"]) > 1:
            distributed.init_process_group(backend, timeout=timeout)
        else:
            # No port: nothing else on this machine can be in the way.
            distributed.init_process_group(backend, store=_private_store(), rank=0, world_size=1, timeout=timeout)
    return device


def _private_store() -> Any:
    return distributed.HashStore()  # type: ignore[attr-defined]


def gather(records: list[T]) -> list[T]:
    """All ranks' records on every rank, rank by rank."""
    if distributed.get_world_size() == 1:
        return records
    everyone: list[list[T] | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, records)
    return [record for part in everyone for record in part or []]


def add_up(tensor: Tensor) -> None:
    """The sum of all ranks' tensors in each of them, in place."""
    if distributed.get_world_size() > 1:
        distributed.all_reduce(tensor)
