"""The GPUs that this process may use: those of the machine, filtered by CUDA_VISIBLE_DEVICES as CUDA filters them.

Asks nvidia-smi, once per process; imports no torch, since a driver that does not fit may crash it. Independent of who
gets which GPU (placement.py).
"""

from __future__ import annotations

import csv
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentrl.errors import ConfigError

log = logging.getLogger(__name__)

MASK = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"
"""The order of nvidia-smi. CUDA's own default puts the fastest GPU first."""
WSL_SMI = "/usr/lib/wsl/lib/nvidia-smi"
MPS_FOLDER = "/tmp/nvidia-mps"
QUERY = ("--query-gpu=uuid,memory.total,mig.mode.current,compute_mode", "--format=csv,noheader,nounits")
SMI_TIMEOUT_S = 20.0
_GPU_LINE = re.compile(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineGpu:
    """One GPU of the machine. Example: `MachineGpu(uuid="GPU-8932f937-...", total_bytes=85 * 10**9)`."""

    uuid: str = ""  # empty where nvidia-smi does not answer
    total_bytes: int | None = None
    is_split: bool = False  # in MIG mode: only its instances can be used
    instances: tuple[str, ...] = ()  # UUIDs of its MIG instances
    is_exclusive: bool = False  # one process alone may use it: compute mode Exclusive_Process


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpu:
    """One GPU, or MIG instance, that this process may use. Example: `VisibleGpu(entry="3")`."""

    entry: str
    """How CUDA_VISIBLE_DEVICES names it: "3", "GPU-8932f937-..." or "MIG-..."."""
    is_mig: bool = False
    is_exclusive: bool = False
    total_bytes: int | None = None  # None where it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpus:
    """What a process sees, in CUDA's order. Example: `visible_gpus().gpus[0].entry`."""

    gpus: tuple[VisibleGpu, ...] = ()
    is_by_bus: bool = True
    """The entries are nvidia-smi's numbers (or UUIDs), not numbers in an order that the user's environment sets."""
    mask: str | None = None
    """CUDA_VISIBLE_DEVICES, for messages."""

    def environment(self, entries: Sequence[str]) -> dict[str, str]:
        """The variables that make a process see these entries alone."""
        return {MASK: ",".join(entries)} | ({ORDER: BY_BUS} if self.is_by_bus else {})

    def __str__(self) -> str:
        what = {0: "no GPU", 1: f"1 GPU ({self._names()})"}.get(len(self.gpus), f"{len(self.gpus)} GPUs")
        return what if self.mask is None else f"{what} ({MASK}={self.mask!r})"

    def _names(self) -> str:
        return ", ".join(gpu.entry for gpu in self.gpus)


def visible_gpus(environment: Mapping[str, str] = os.environ) -> VisibleGpus:
    """The GPUs that this process may use. Raises ConfigError for a mask that names one twice."""
    return visible(machine_gpus(), environment.get(MASK), order=environment.get(ORDER))


def visible(machine: Sequence[MachineGpu], mask: str | None, *, order: str | None = None) -> VisibleGpus:
    """Apply CUDA's rules: without a mask all; with one its entries up to the first that names no GPU.

    UUIDs of whole GPUs become nvidia-smi's numbers where it lists them: DeepSpeed reads the variable as numbers.
    Raises ConfigError for a mask that names a GPU twice.

    >>> two = [MachineGpu(uuid="GPU-aa"), MachineGpu(uuid="GPU-bb")]
    >>> [gpu.entry for gpu in visible(two, None).gpus], [gpu.entry for gpu in visible(two, "GPU-bb").gpus]
    (['0', '1'], ['1'])
    >>> [gpu.entry for gpu in visible(two, "1,-1,0").gpus], visible(two, "").gpus
    (['1'], ())
    """
    if mask is None:
        return VisibleGpus(gpus=_all(machine))
    found: list[VisibleGpu] = []
    names = [name.strip() for name in mask.split(",")]
    is_by_bus = order == BY_BUS or not any(name.isdigit() for name in names)
    for name in names:
        if (gpu := _named(machine, name, by_number=is_by_bus)) is None:
            break
        if gpu in found:
            raise ConfigError(f"{MASK}={mask!r} names GPU {name} twice, and CUDA would show none: name each once")
        found.append(gpu)
    return VisibleGpus(gpus=tuple(found), is_by_bus=is_by_bus, mask=mask)


def _all(machine: Sequence[MachineGpu]) -> tuple[VisibleGpu, ...]:
    """Numbers; where a GPU is split into MIG instances, UUIDs, since CUDA numbers what is left in another way."""
    if not any(gpu.is_split for gpu in machine):
        return tuple(_seen(gpu, str(at)) for at, gpu in enumerate(machine))
    found: list[VisibleGpu] = []
    for gpu in machine:
        found += [_seen(gpu, uuid) for uuid in gpu.instances] if gpu.is_split else [_seen(gpu, gpu.uuid)]
    return tuple(found)


def _seen(gpu: MachineGpu, entry: str) -> VisibleGpu:
    """The GPU, or an instance of it, under this name."""
    return VisibleGpu(
        entry=entry,
        is_mig=gpu.is_split,
        is_exclusive=gpu.is_exclusive,
        total_bytes=None if gpu.is_split else gpu.total_bytes,
    )


def _named(machine: Sequence[MachineGpu], name: str, *, by_number: bool) -> VisibleGpu | None:
    """The GPU that an entry of the mask names; None where it names none.

    Args:
        by_number: a UUID may be replaced by nvidia-smi's number, since no number in another order stands beside it.
    """
    if not machine or not name:
        return None
    if name.isdigit():
        if int(name) >= len(machine):
            return None
        return _seen(machine[int(name)], str(int(name)))
    if name.startswith("MIG-"):
        return VisibleGpu(entry=name, is_mig=True)
    if not name.startswith("GPU-"):
        return None
    matches = [at for at, gpu in enumerate(machine) if gpu.uuid.startswith(name)]
    if len(matches) != 1:  # CUDA takes a beginning that is unique
        return None if all(gpu.uuid for gpu in machine) else VisibleGpu(entry=name)
    gpu = machine[matches[0]]
    is_plain = by_number and not any(one.is_split for one in machine)
    return _seen(gpu, str(matches[0]) if is_plain else gpu.uuid)


@cache
def machine_gpus() -> tuple[MachineGpu, ...]:
    """The GPUs of this machine or container, by nvidia-smi; else as many as there are device files."""
    if (smi := nvidia_smi()) is not None:
        try:
            return read_machine(smi)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            log.warning("nvidia-smi does not list the GPUs (%s): their device files are counted instead", error)
    return device_files()


def nvidia_smi() -> str | None:
    """The path of nvidia-smi; None where there is none. Example: `nvidia_smi() == "/usr/bin/nvidia-smi"`."""
    return shutil.which("nvidia-smi") or shutil.which(WSL_SMI)


def read_machine(smi: str, *, timeout_s: float = SMI_TIMEOUT_S) -> tuple[MachineGpu, ...]:
    """What nvidia-smi lists. Raises OSError, ValueError or SubprocessError when it fails or takes too long."""
    rows = csv.reader(smi_answer([smi, *QUERY], timeout_s=timeout_s).splitlines(), skipinitialspace=True)
    queried = [(uuid, memory, mig == "Enabled", mode) for uuid, memory, mig, mode in rows]
    is_any_split = any(is_split for _, _, is_split, _ in queried)
    instances = parse_instances(smi_answer([smi, "-L"], timeout_s=timeout_s)) if is_any_split else {}
    return tuple(
        MachineGpu(
            uuid=uuid,
            total_bytes=int(memory) * 2**20 if memory.isdigit() else None,  # [N/A] where it is the host's memory
            is_split=is_split,
            instances=instances.get(uuid, ()),
            is_exclusive=mode == "Exclusive_Process" and not has_mps(os.environ),  # MPS is the one process then
        )
        for uuid, memory, is_split, mode in queried
    )


def has_mps(environment: Mapping[str, str]) -> bool:
    """Whether a control daemon of NVIDIA's Multi-Process Service listens here."""
    return (Path(environment.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_FOLDER) / "control").exists()


def smi_answer(command: Sequence[str], *, timeout_s: float = SMI_TIMEOUT_S) -> str:
    """What a call of nvidia-smi prints. Raises OSError, with its message, or SubprocessError when it takes too long."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise OSError(f"exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}")
    return done.stdout


def parse_instances(listing: str) -> dict[str, tuple[str, ...]]:
    """UUIDs of the MIG instances by the UUID of their GPU, from the output of `nvidia-smi -L`."""
    found: dict[str, tuple[str, ...]] = {}
    uuid = ""
    for line in listing.splitlines():
        if match := _GPU_LINE.match(line):
            uuid = match[1]
        elif match := _MIG_LINE.match(line):
            found[uuid] = (*found.get(uuid, ()), match[1])
    return found


def device_files(folder: Path = Path("/dev")) -> tuple[MachineGpu, ...]:
    """One GPU for each /dev/nvidia0, /dev/nvidia1, ...: a container without nvidia-smi has those that it may use."""
    return tuple(MachineGpu() for path in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
