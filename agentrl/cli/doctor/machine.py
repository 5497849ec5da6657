"""Doctor's checks of the machine: GPUs, memory, disks, loopback, clock, file descriptors.

Each check receives plain numbers and paths; cli/doctor/config_checks.py computes them from a config.
"""

from __future__ import annotations

import csv
import errno
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.cli.doctor.findings import Finding, fail, ok, shortened, warn
from agentrl.engine.gpus import nvidia_smi, smi_answer

MIB, GIB = 2**20, 2**30
QUERY = "--query-gpu=name,driver_version,memory.total,memory.free,compute_mode,compute_cap"
ASK_TORCH = """
import json, torch
num_gpus, reason = torch.cuda.device_count() if torch.cuda.is_available() else 0, ""
if torch.version.cuda and not num_gpus:
    try:
        torch.cuda.init()
    except Exception as error:
        reason = str(error)
print(json.dumps([torch.__version__, torch.version.cuda, num_gpus, reason]))
"""
OTHER_CAUSES = (
    "if it is too old; unset CUDA_VISIBLE_DEVICES if it is empty; for error 802 start NVIDIA's fabric manager "
    "(`sudo systemctl start nvidia-fabricmanager`)"
)
REPAIR = (
    "repair the driver: restart the machine if the driver was updated (version mismatch), else install it again; "
    "in a container, use the host's (docker: `--gpus all`)"
)
CUDA_BUILD = "`AGENTRL_BUILD=cuda make setup` installs the CUDA build in its place"
NO_GPU = "run it on a machine with a GPU, or take the CPU build: `AGENTRL_BUILD=cpu make setup`"
DRIVER = (
    "install NVIDIA's driver (WSL2: Windows' driver, and /usr/lib/wsl/lib on PATH), and in a container start it with "
    "its GPUs (docker: `--gpus all`)"
)
MAX_CLOCK_DRIFT_S = 0.05
CLOCK_S = 0.5
MAX_READING_S = 0.005
EARLIEST_TIME_S = 1_735_689_600.0  # 2025: a clock before it was never set, and no certificate is valid yet
MIN_DESCRIPTORS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as nvidia-smi describes it. Example: `[gpu] = read_gpus()`."""

    name: str
    driver: str
    total_bytes: int
    free_bytes: int
    compute_mode: str = "Default"
    capability: str = "9.0"
    """Compute capability: 9.0 is Hopper, 10.0 a B200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchCuda:
    """What torch reports about GPUs. Example: `ask_torch().num_gpus`."""

    version: str
    cuda: str | None  # None: a CPU build
    num_gpus: int  # GPUs that torch can use
    reason: str = ""  # why it can use none


def read_gpus(smi: str | None = None) -> list[Gpu]:
    """The GPUs that nvidia-smi lists; none where it is not installed. Raises OSError or SubprocessError when it fails.

    Args:
        smi: its path; None: where the machine has it.
    """
    if (smi := smi or nvidia_smi()) is None:
        return []
    rows = csv.reader(smi_answer([smi, QUERY, "--format=csv,noheader,nounits"]).splitlines(), skipinitialspace=True)
    return [
        Gpu(
            name=name,
            driver=driver,
            total_bytes=_mib(total_mib),
            free_bytes=_mib(free_mib),
            compute_mode=compute_mode,
            capability=capability,
        )
        for name, driver, total_mib, free_mib, compute_mode, capability in rows
    ]


def _mib(text: str) -> int:
    """Bytes; 0 for the `[N/A]` of a GPU without memory of its own."""
    return int(text) * MIB if text.isdigit() else 0


def ask_torch(*, timeout_s: float = 90.0) -> TorchCuda:
    """Ask torch in a separate process, which a mismatched driver may crash. Raises OSError with its error output."""
    done = subprocess.run(
        [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        raise OSError(f"`import torch` ends with exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    version, cuda, num_gpus, reason = json.loads(done.stdout.splitlines()[-1])
    return TorchCuda(version=version, cuda=cuda, num_gpus=num_gpus, reason=reason)


def no_answer(error: Exception, *, is_cuda_build: bool) -> Finding:
    """The finding where nvidia-smi is there and fails; the CPU build runs without it."""
    return (fail if is_cuda_build else warn)("GPU", shortened(f"nvidia-smi fails: {error}"), REPAIR)


def gpus(
    found: Sequence[Gpu], torch: TorchCuda | None, *, has_device: bool, wanted: int | None, is_cuda_build: bool = False
) -> Finding:
    """Compare the driver's GPUs with those that torch can use.

    Args:
        torch: None where torch is not installed.
        has_device: the kernel shows an NVIDIA device.
        wanted: how many GPUs a run needs; None where it needs none.
        is_cuda_build: vLLM's CUDA build is installed, which runs on nothing else.
    """
    if not found:
        if torch is not None and torch.num_gpus:
            said = f"torch {torch.version} uses {torch.num_gpus}, and nvidia-smi shows none: their memory is not known"
            return warn("GPU", said, "in a container: set NVIDIA_DRIVER_CAPABILITIES=compute,utility")
        if has_device:
            return fail("GPU", "there is an NVIDIA device, but nvidia-smi shows no GPU", DRIVER)
        if is_cuda_build:
            return warn("GPU", "none, and the CUDA build needs one: no engine or learner runs here", NO_GPU)
        return ok("GPU", "none: engine and learner run on the CPU")
    what = f"{len(found)} x {found[0].name}, driver {found[0].driver}"
    if torch is not None and torch.cuda is None:
        return warn("GPU", f"{what}; torch {torch.version} is a CPU build and uses none of it", CUDA_BUILD)
    if torch is not None and torch.num_gpus == 0:
        said = shortened(f"{what}; torch {torch.version} (CUDA {torch.cuda}) can use none: {torch.reason}")
        return fail("GPU", said, f"update the driver to one for CUDA {torch.cuda} {OTHER_CAUSES}")
    usable = len(found) if torch is None else torch.num_gpus
    if wanted is not None and wanted > usable:
        fix = "lower engine.replicas, engine.tensor_parallel or learner.num_ranks, or name other engine.gpus"
        return fail("GPU", f"{what}; the run needs {wanted}, and {usable} can be used", fix)
    return ok("GPU", what if torch is None else f"{what}, torch {torch.version} uses {usable}")


def gpu_memory(found: Sequence[Gpu], shares: Mapping[int, float]) -> Finding:
    """Whether the memory that a run may take is free. `shares`: parts of a GPU's memory, by nvidia-smi's numbers."""
    asked = [(at, found[at], share) for at, share in sorted(shares.items()) if at < len(found)]
    if not all(gpu.total_bytes for _, gpu, _ in asked):
        fix = "set engine.kv_cache_bytes, and leave the learner enough"
        return warn("GPU memory", "nvidia-smi does not tell its size: it may be the machine's own memory", fix)
    short = [
        f"GPU {at}: {_size(gpu.free_bytes)} of {_size(gpu.total_bytes)} free, and the run may take {share:.0%}"
        for at, gpu, share in asked
        if gpu.free_bytes < share * gpu.total_bytes
    ]
    if short:
        fix = "`nvidia-smi` shows which program uses it: end that, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        return warn("GPU memory", "; ".join(short), fix)
    return ok("GPU memory", f"what the run may take is free on GPU {', '.join(str(at) for at, _, _ in asked)}")


def memory(*, needed_bytes: int, available_bytes: int | None = None) -> Finding:
    """Whether enough memory is available, in the machine and in this control group. `needed_bytes` is an estimate."""
    available = available_memory_bytes() if available_bytes is None else available_bytes
    found = f"{_size(available)} available; about {_size(needed_bytes)} are needed"
    if available < needed_bytes:
        fix = "end other programs, give the container more, or take a smaller model or engine.kv_cache_bytes"
        return (fail if available < needed_bytes / 2 else warn)("memory", found, fix)
    return ok("memory", found)


def available_memory_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Available memory of the machine, or what is left of the control group's limit where that is less."""
    lines = dict(line.split(":", 1) for line in proc.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no control group of version 2, or the root's, which has no limit
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))


def disk(name: str, path: Path, *, needed_bytes: int, fix: str, enough_bytes: int = 0) -> Finding:
    """Whether a folder (or its nearest existing parent) is writable and has room. Below `enough_bytes` it is a WARN."""
    folder = next(one for one in (path, *path.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"agentrl")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fix = fix if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose a folder that you may write"
        return fail(name, f"cannot write in {folder}: {error.strerror}", fix)
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    found = f"{_size(free)} free in {folder}"
    if state.f_files and not state.f_favail:
        return fail(name, f"{found}, and no file can be added (no inodes)", "delete files there")
    if free < needed_bytes:
        return fail(name, f"{found}; at least {_size(needed_bytes)} are needed", fix)
    if free < enough_bytes:
        return warn(name, f"{found}; a whole run may write {_size(enough_bytes)}", fix)
    return ok(name, found)


def loopback(host: str = "127.0.0.1") -> Finding:
    """Whether programs on this machine can connect to each other, as the parts of a run do."""
    try:
        with socket.create_server((host, 0)) as server:
            server.settimeout(5)
            with socket.create_connection(server.getsockname()[:2], timeout=5) as there:
                here, _ = server.accept()
                with here:
                    there.sendall(b"x")
                    here.settimeout(5)
                    heard = here.recv(1)
    except OSError as error:
        return fail("loopback", f"{host} does not answer: {error}", "bring it up: `ip link set lo up`")
    if heard != b"x":
        return fail("loopback", f"{host} loses data", "check the firewall's rules for lo")
    return ok("loopback", f"free ports on {host} answer")


def read_clocks(*, seconds: float = CLOCK_S, every_s: float = 0.02) -> list[tuple[float, float]]:
    """(monotonic, wall) pairs over a while, at least two."""
    pairs: list[tuple[float, float]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(pairs) < 2:
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        if after - before < MAX_READING_S:  # else another process ran in between
            pairs.append((before, wall))
        time.sleep(every_s)
    return pairs


def clock(pairs: Sequence[tuple[float, float]], *, max_drift_s: float = MAX_CLOCK_DRIFT_S) -> Finding:
    """Whether the wall clock agrees with the monotonic clock. Deadlines use the latter: a jump affects only times."""
    offsets = [wall - monotonic for monotonic, wall in pairs]
    drift_s, seconds = max(offsets) - min(offsets), pairs[-1][0] - pairs[0][0]
    monotonic = [one for one, _ in pairs]
    if monotonic != sorted(monotonic):
        return fail("clock", "the monotonic clock goes backwards", "every deadline depends on it: repair the machine")
    if pairs[-1][1] < EARLIEST_TIME_S:
        year = time.gmtime(pairs[-1][1]).tm_year
        return fail("clock", f"it is set to {year}: nothing that uses TLS works", "set it, e.g. with chrony or ntpd")
    if drift_s > max_drift_s:
        found = f"the wall clock moved by {drift_s:.2g} s against the monotonic one in {seconds:.1f} s"
        return warn("clock", found, "let one program set it, slowly: chrony or ntpd; times in logs and plots jump")
    return ok("clock", f"wall and monotonic agree to {drift_s * 1000:.1f} ms over {seconds:.1f} s")


def descriptors(*, needed: int, limits: tuple[int, int] | None = None) -> Finding:
    """Whether the process may open enough files and connections. `limits`: (soft, hard); default: this process's."""
    soft, hard = (_endless(limit) for limit in limits or resource.getrlimit(resource.RLIMIT_NOFILE))
    found = f"{soft} may be open (ulimit -n); about {needed} are needed"
    if soft >= needed:
        return ok("open files", found)
    target = max(needed, 65_536)
    fix = f"`ulimit -n {min(target, hard)}`" if hard >= needed else f"raise the hard limit of {hard} to {target}"
    return (fail if soft < MIN_DESCRIPTORS else warn)("open files", found, fix)


def _endless(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _size(num_bytes: int) -> str:
    return shortened(f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / MIB:.0f} MiB")
