"""The learner's processes (ranks): joining them, collectives over small records, and weights that ZeRO-3 divides.

With `learner.sequence_parallel` n, each n consecutive ranks are a sequence group: they compute the same trajectories,
each rank a part of every pack's tokens (trainer/gradient/sequence.py). Groups share the step's work as ranks otherwise
do.

The only module of the trainer that calls torch.distributed. Records travel as msgpack and are decoded into the type
that the caller names; torch's own object collectives would pickle them. Independent of training.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, distributed

from agentrl.engine.gpus import MASK
from agentrl.errors import ConfigError

T = TypeVar("T")

BROADCAST_BYTES = 2**25
"""Size of the pieces in which rank 0's records travel."""
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """For an entry point started without a launcher: one rank. Variables that a launcher set are kept."""
    for name, value in ALONE.items():
        environment.setdefault(name, value)
    if not torch.cuda.is_available():
        environment.setdefault("DS_ACCELERATOR", "cpu")


@dataclass(frozen=True, slots=True)
class _SequenceGroup:
    size: int
    group: Any  # of torch.distributed; None for a size of 1


_ALONE = _SequenceGroup(1, None)
_groups: dict[int, _SequenceGroup] = {}
"""This rank's sequence group of every size that was joined: torch never frees a group."""
_joined = [_ALONE]
"""The one in use. Process-wide, as torch's own process group is."""


def join(*, timeout_s: float, sequence_parallel: int = 1) -> torch.device:
    """Join the process group of torchrun or the DeepSpeed launcher (alone without one) and return this rank's device.

    Joining twice is safe. NCCL between GPUs, gloo between CPUs. Raises ConfigError if the ranks that were started do
    not form sequence groups of `sequence_parallel`.
    """
    has_gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]  # from here on nothing reads the mask but DeepSpeed
        hide_uuids(os.environ)
    if not distributed.is_initialized():
        backend, timeout = "nccl" if has_gpu else "gloo", timedelta(seconds=timeout_s)
        if int(os.environ["WORLD_SIZE"]) > 1:
            distributed.init_process_group(backend, timeout=timeout)
        else:
            # No port, so no other process of this machine can be in the way.
            distributed.init_process_group(backend, store=_private_store(), rank=0, world_size=1, timeout=timeout)
    _joined[0] = _sequence_group(sequence_parallel, timedelta(seconds=timeout_s))
    return device


def _sequence_group(size: int, timeout: timedelta) -> _SequenceGroup:
    if count() % size:
        raise ConfigError(
            f"learner.sequence_parallel={size} does not divide the {count()} ranks that run: make learner.num_ranks a "
            "multiple of it"
        )
    if size == 1:
        return _ALONE
    if size not in _groups:
        start_deepspeed()
        # Every rank makes every group, in the same order, as torch demands.
        every = [distributed.new_group(range(at, at + size), timeout=timeout) for at in range(0, count(), size)]
        _groups[size] = _SequenceGroup(size, every[index() // size])
    return _groups[size]


def hide_uuids(environment: MutableMapping[str, str]) -> None:
    """Remove a mask that names GPUs or MIG instances by UUID: DeepSpeed reads CUDA_VISIBLE_DEVICES as numbers."""
    if not all(name.strip().isdigit() for name in environment.get(MASK, "0").split(",")):
        del environment[MASK]


def _private_store() -> Any:
    return distributed.HashStore()  # type: ignore[attr-defined]


def leave() -> None:
    """Leave the process group."""
    distributed.destroy_process_group()


def index() -> int:
    """This process's rank."""
    return distributed.get_rank()


def count() -> int:
    """How many ranks there are."""
    return distributed.get_world_size()


def start_deepspeed() -> None:
    """Start DeepSpeed's communication on the process group that was joined; its engine would do so later.

    Without its shared-memory collective for CPUs, which it compiles at start: half a minute, and it needs a compiler.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=distributed.get_backend())


def sequence_count() -> int:
    """How many ranks divide each pack among them; 1 without sequence parallelism."""
    return _joined[0].size


def sequence_index() -> int:
    """This rank's place in its sequence group: 0 has the first tokens of every pack."""
    return index() % sequence_count() if sequence_count() > 1 else 0


def sequence_group() -> Any:
    """torch's process group of this rank's sequence group. Only where `sequence_count()` is above 1."""
    return _joined[0].group


@contextmanager
def without_sequence_groups() -> Iterator[None]:
    """Inside, every rank computes whole packs by itself."""
    before, _joined[0] = _joined[0], _ALONE
    try:
        yield
    finally:
        _joined[0] = before


def data_index() -> int:
    """Which share of a batch this rank computes: the ranks of a sequence group have the same."""
    return index() // sequence_count()


def data_count() -> int:
    """Into how many shares a batch is divided: one for each sequence group."""
    return count() // sequence_count()


def is_first() -> bool:
    """Whether this is rank 0, which alone writes shared files and talks to the orchestrator."""
    return index() == 0


def barrier() -> None:
    """Return once every rank has called it."""
    distributed.barrier()


def gather(records: list[T], kind: type[T]) -> list[T]:
    """All ranks' records, each a `kind`, on every rank, in the order of ranks."""
    if count() == 1:
        return records
    return [record for part in _all_bytes(_encoded(records)) for record in _decoded(part, list[kind])]  # type: ignore[valid-type]


def gather_data(records: list[T], kind: type[T]) -> list[T]:
    """The records of all shares of a batch on every rank, in the order of shares: of each sequence group once."""
    return gather(records if sequence_index() == 0 else [], kind)


def of_first(record: T, kind: Any) -> T:
    """Rank 0's record, a `kind`, on every rank."""
    if count() == 1:
        return record
    first: T = _decoded(_bytes_of_first(_encoded(record) if is_first() else b""), kind)
    return first


def on_this_machine() -> int:
    """How many ranks run on this machine, this one included. Every rank must call it."""
    return gather([own := platform.node()], str).count(own)


def add_up(tensor: Tensor) -> None:
    """Replace the tensor, in place, by the sum of all ranks' tensors."""
    if count() > 1:
        distributed.all_reduce(tensor)


def add_up_parts(whole: Tensor) -> Tensor:
    """This rank's part of the sum of all ranks' vectors, which have as many equal parts as there are ranks."""
    if count() == 1:
        return whole
    part = whole.new_empty(len(whole) // count())
    distributed.reduce_scatter_single(part, whole)
    return part


def add_up_sequence(tensor: Tensor) -> None:
    """The same over the ranks of this sequence group."""
    if sequence_count() > 1:
        distributed.all_reduce(tensor, group=sequence_group())


def rows_of_sequence(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows of all ranks of this sequence group one after the other, on each of them. `counts` says how many each
    rank has."""
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(parts, padded, group=sequence_group())
    return torch.cat([part[:number] for part, number in zip(parts, counts, strict=True)])


def exchanged_in_sequence(parts: Tensor) -> Tensor:
    """`parts[r]` is for rank r of this sequence group; the result's `[r]` is from rank r."""
    received = torch.empty_like(parts)
    distributed.all_to_all_single(received, parts, group=sequence_group())
    return received


def is_divided(parameter: Tensor) -> bool:
    """Whether ZeRO-3 divided the parameter among ranks."""
    return hasattr(parameter, "ds_shape")


def whole_shape(parameter: Tensor) -> torch.Size:
    """Shape of the whole parameter, also where ZeRO-3 divided it."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def gathered(parameters: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Inside, divided parameters are whole on every rank; a no-op where none is divided. Every rank must enter it."""
    divided = [parameter for parameter in parameters if is_divided(parameter)]
    if not divided:
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(divided, modifier_rank=None)
    return context


def _bytes_of_first(mine: bytes) -> bytes:
    """Rank 0's bytes on every rank, in pieces: a batch of hundreds of MB takes one buffer of GPU memory."""
    device = _wire_device()
    size = torch.tensor([len(mine)], device=device)
    distributed.broadcast(size, src=0)
    data = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else torch.empty(int(size), dtype=torch.uint8)
    for piece in torch.split(data, BROADCAST_BYTES):
        buffer = piece.to(device or "cpu")
        distributed.broadcast(buffer, src=0)
        piece.copy_(buffer)
    return data.numpy().tobytes()


def _wire_device() -> torch.device | None:
    """Where tensors must be to travel: NCCL takes none in host memory."""
    return torch.device("cuda", torch.cuda.current_device()) if distributed.get_backend() == "nccl" else None


def _all_bytes(mine: bytes) -> list[bytes]:
    """Every rank's bytes on every rank."""
    device = _wire_device()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(count())]
    distributed.all_gather(sizes, torch.tensor([len(mine)], device=device))
    longest = max(1, *(int(size) for size in sizes))
    padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8).to(device or "cpu")
    parts = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(parts, padded)
    return [part.cpu().numpy().tobytes()[: int(size)] for part, size in zip(parts, sizes, strict=True)]


def _encoded(record: object) -> bytes:
    return msgspec.msgpack.encode(record, enc_hook=_from_tensor)


def _decoded(data: bytes, kind: Any) -> Any:
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_to_tensor)


def _from_tensor(value: object) -> tuple[str, list[int], bytes]:
    if not isinstance(value, Tensor):
        raise NotImplementedError(f"ranks do not exchange objects of type {type(value).__name__}")
    tensor = value.detach().cpu().contiguous()
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.numpy().tobytes()


def _to_tensor(kind: type, value: tuple[str, list[int], bytes]) -> Tensor:
    dtype, shape, data = value
    if kind is not Tensor or dtype not in ("float32", "float64", "int64"):
        raise ValueError(f"ranks do not exchange a {kind.__name__} of {dtype}")
    if not data:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
