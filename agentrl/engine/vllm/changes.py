"""What changed between two versions of the weights: found, named in a folder, and put into the older version.

Exact: bits are compared and replaced, nothing is added. The learner writes such folders (trainer/weights/delta.py), the
engine reads them. Independent of vLLM, HTTP and versions.

A folder holds `delta*.safetensors`. Each tensor that changed has there the smallest of

    at:NAME, values:NAME      positions in the flattened tensor (int32), and the new values there
    mask:NAME, values:NAME    a bit for each element, the lowest of a byte first, and the values where it is set
    whole:NAME                the new tensor

With 2 bytes a value the first is smallest below 3.1 % of changed elements, the last above 94 %. Where an adapter is all
that changes, it has for each adapted weight

    down:NAME, up:NAME, scale:NAME    the adapter: `merged` makes the new tensor of it and the one in the whole folder
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FILES = "delta*.safetensors"
AT, MASK, VALUES, WHOLE = "at", "mask", "values", "whole"
DOWN, UP, SCALE = "down", "up", "scale"
_KINDS = ({AT, VALUES}, {MASK, VALUES}, {WHOLE}, {DOWN, UP, SCALE})
_AT_BYTES = 4
_MAX_POSITIONS = 2**31
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Parts = Mapping[str, Tensor]
"""What one folder says of one tensor, by kind."""


def key(kind: str, name: str) -> str:
    """The name in the file of one part of tensor `name`."""
    return f"{kind}:{name}"


def difference(old: Tensor, new: Tensor) -> dict[str, Tensor]:
    """What makes `new` of `old`, by kind; empty where no bit differs. Both on the CPU and contiguous.

    Raises ValueError when their shapes or types differ.
    """
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"{old.dtype} {tuple(old.shape)} became {new.dtype} {tuple(new.shape)}")
    bits = _flat_bits(new)
    is_changed = _flat_bits(old) != bits
    num_changed, size = int(is_changed.count_nonzero()), new.element_size()
    if not num_changed:
        return {}
    num_bytes = {
        AT: num_changed * (_AT_BYTES + size),
        MASK: -(-new.numel() // 8) + num_changed * size,
        WHOLE: new.numel() * size,
    }
    if new.numel() > _MAX_POSITIONS:
        del num_bytes[AT]
    kind = min(num_bytes, key=lambda kind: num_bytes[kind])
    if kind == WHOLE:
        return {WHOLE: new}
    if kind == MASK:
        mask = torch.from_numpy(np.packbits(is_changed.numpy(), bitorder="little"))
        return {MASK: mask, VALUES: bits[is_changed].view(new.dtype)}
    at = is_changed.nonzero()[:, 0]
    return {AT: at.to(torch.int32), VALUES: bits[at].view(new.dtype)}


@torch.no_grad()
def merged(weight_OI: Tensor, *, down_RI: Tensor, up_OR: Tensor, scale: float) -> Tensor:
    """W + scale * B A, in float32: a new tensor [O, I]. The learner's weights and the engine's come of this one line.

    Two kinds of processor may round it differently.
    """
    return torch.addmm(weight_OI.float(), up_OR.float(), down_RI.float(), alpha=scale)


def applied(old: Tensor, changes: Sequence[Parts], device: torch.device | None = None) -> Tensor:
    """`old` after the changes, in their order: a new tensor, or `old` itself where nothing changed.

    Adapters are merged on `device`; None: on the CPU. Raises ValueError for changes that are not of such a tensor.
    """
    result, is_copy = old, False
    for parts in changes:
        if DOWN in parts:
            weight_OI, down_RI, up_OR = (one.to(device) for one in (result, parts[DOWN], parts[UP]))
            whole_OI = merged(weight_OI, down_RI=down_RI, up_OR=up_OR, scale=float(parts[SCALE]))
            result, is_copy = whole_OI.to(old.dtype), True
        elif WHOLE in parts:
            result, is_copy = parts[WHOLE], False
        elif parts:
            result = result if is_copy else result.clone()
            is_copy = True
            _replace(result, parts)
        if result.shape != old.shape or result.dtype != old.dtype:
            raise ValueError(f"{old.dtype} {tuple(old.shape)} became {result.dtype} {tuple(result.shape)}")
    return result


def _replace(tensor: Tensor, parts: Parts) -> None:
    values = parts[VALUES]
    if values.dtype != tensor.dtype:
        raise ValueError(f"values of type {values.dtype} for a tensor of type {tensor.dtype}")
    flat, bits = _flat_bits(tensor), _flat_bits(values)
    if AT in parts:
        at = parts[AT].long()
        if len(at) != len(bits) or (len(at) and not 0 <= int(at.min()) <= int(at.max()) < len(flat)):
            raise ValueError(f"{len(bits)} values at {len(at)} positions, which must lie in {len(flat)} elements")
        flat.index_copy_(0, at, bits)
        return
    mask = torch.from_numpy(np.unpackbits(parts[MASK].numpy(), count=len(flat), bitorder="little")).bool()
    if int(mask.count_nonzero()) != len(bits):
        raise ValueError(f"{len(bits)} values for {int(mask.count_nonzero())} changed elements")
    flat.masked_scatter_(mask, bits)


def check(folders: Sequence[Path], names: Iterable[str]) -> None:
    """Read the headers of these folders, which must change tensors of `names` only.

    Raises FileNotFoundError where there are no changes, ValueError for those of another model; safetensors refuses a
    truncated file.
    """
    known = set(names)
    for folder in folders:
        with ExitStack() as files:
            found = _Folder(folder, files).kinds
        if unknown := found.keys() - known:
            raise ValueError(f"{folder} changes {len(unknown)} unknown tensors: {sorted(unknown)[:5]}")
        if wrong := [name for name, kinds in found.items() if kinds.keys() not in _KINDS]:
            raise ValueError(f"{folder} says incompletely what changed in {len(wrong)} tensors: {sorted(wrong)[:5]}")


def changed_tensors(
    tensors: Iterable[tuple[str, Tensor]], folders: Sequence[Path], device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The named tensors after the changes in these folders, in their order; one in memory at a time. See `applied`."""
    with ExitStack() as files:
        opened = [_Folder(folder, files) for folder in folders]
        for name, tensor in tensors:
            yield name, applied(tensor, [folder.parts(name) for folder in opened], device)


class _Folder:
    """The changes in one folder, whose files stay open until `files` is closed."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        from safetensors import safe_open

        if not (paths := sorted(folder.glob(FILES))):
            raise FileNotFoundError(f"no {FILES} in {folder}: do engine and learner see the same disk?")
        self.kinds: dict[str, dict[str, Any]] = {}
        """For each tensor, the file of each kind."""
        for path in paths:
            file = files.enter_context(safe_open(path, framework="pt"))
            for entry in file.keys():  # noqa: SIM118 - not a mapping
                kind, _, name = entry.partition(":")
                self.kinds.setdefault(name, {})[kind] = file

    def parts(self, name: str) -> dict[str, Tensor]:
        """What it says of one tensor; empty where that did not change."""
        return {kind: file.get_tensor(key(kind, name)) for kind, file in self.kinds.get(name, {}).items()}


def _flat_bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals itself and -0.0 is not 0.0. [elements]

    A complex number or another type without an integer of its size raises KeyError.
    """
    return tensor.view(-1).view(_BITS[tensor.element_size()])
