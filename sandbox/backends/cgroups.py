"""One control group per session, v1 or v2, where the service may write them. Independent of what runs inside."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path

from sandbox.backends import processes

_CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000
_MEMORY_AND_SWAP = "memory.memsw.limit_in_bytes"
_OF_SWAP = (_MEMORY_AND_SWAP, "memory.swap.max")
"""Files that only kernels which account swap have. A session has no swap of its own."""
_MAX_FREE = 64
_MAX_RESIDUE_BYTES = (
    1024**2
)  # memory that the kernel still charges to a group after its last process, and would charge to the next session


class Cgroup:
    """The control group of one session: a folder per controller under v1, one folder for all under v2."""

    def __init__(self, folders: Mapping[str, Path], *, is_v2: bool) -> None:
        self._folders, self._is_v2 = folders, is_v2
        self._limits: tuple[int, int, float] | None = None
        self._past_oom_kills = 0
        for folder in set(folders.values()):
            folder.mkdir()

    def limit(self, *, memory_bytes: int, num_processes: int, cpus: float) -> None:
        """Limit the sums over all processes of the group; `cpus` is in cores."""
        if self._limits == (memory_bytes, num_processes, cpus):
            return
        self._limits = (memory_bytes, num_processes, cpus)
        quota_us = int(cpus * _CPU_PERIOD_US)
        if self._is_v2:
            settings = [
                ("memory", "memory.max", str(memory_bytes)),
                ("memory", "memory.swap.max", "0"),
                ("cpu", "cpu.max", f"{quota_us} {_CPU_PERIOD_US}"),
            ]
        else:
            settings = [
                ("memory", _MEMORY_AND_SWAP, "-1"),  # first, because it is never below the limit of memory alone
                ("memory", "memory.limit_in_bytes", str(memory_bytes)),
                ("memory", _MEMORY_AND_SWAP, str(memory_bytes)),
                ("cpu", "cpu.cfs_quota_us", str(quota_us)),
            ]
        for controller, name, value in [*settings, ("pids", "pids.max", str(num_processes))]:
            if controller in self._folders:
                with contextlib.suppress(*([FileNotFoundError] if name in _OF_SWAP else [])):
                    (self._folders[controller] / name).write_text(value)

    def open_procs(self) -> list[int]:
        """Descriptors for joining: a process that writes "0" to each is in the group, and so are its later children."""
        fds: list[int] = []
        try:
            for folder in dict.fromkeys(self._folders.values()):
                fds.append(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def processes(self) -> list[int]:
        """Ids of the processes in the group."""
        folder = self._folders.get("pids") or next(iter(self._folders.values()))
        return [int(line) for line in processes.read(f"{folder}/cgroup.procs").split()]

    def num_oom_kills(self) -> int:
        """Number of kernel kills for memory in the group since it was made, `reset` or `forget_oom_kills`."""
        return self._all_oom_kills() - self._past_oom_kills

    def forget_oom_kills(self) -> None:
        """Count kernel kills from now on."""
        self._past_oom_kills = self._all_oom_kills()

    def _all_oom_kills(self) -> int:
        if "memory" not in self._folders:
            return 0
        return oom_kills(f"{self._folders['memory']}/{'memory.events' if self._is_v2 else 'memory.oom_control'}")

    def reset(self) -> bool:
        """Prepare it for another session. False when something of the last session is left in it."""
        name = "memory.current" if self._is_v2 else "memory.usage_in_bytes"
        if self.processes():
            return False
        if (
            "memory" in self._folders
            and int(processes.read(f"{self._folders['memory']}/{name}") or 0) > _MAX_RESIDUE_BYTES
        ):
            return False
        self.forget_oom_kills()
        return True

    def remove(self, *, deadline_s: float = 2.0) -> bool:
        """Delete the folders once the last process is gone. False when the deadline passes first."""
        return _remove(list(set(self._folders.values())), deadline_s)


def oom_kills(path: str) -> int:
    """The count in a group's memory.events (v2) or memory.oom_control (v1); 0 when there is no such file."""
    for line in processes.read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill":
            return int(value)
    return 0


class CgroupParent:
    """The service's own group, which contains those of the sessions."""

    def __init__(self, folders: Mapping[str, Path], *, is_v2: bool) -> None:
        self._folders, self._is_v2 = folders, is_v2
        self._numbers = itertools.count(1)
        self._free: list[Cgroup] = []
        self.controllers = tuple(folders)

    def take(self) -> Cgroup:
        """An empty group with any limits. Reuses a group if possible, which is cheaper. Raises OSError."""
        if self._free:
            return self._free.pop()
        name = f"session-{next(self._numbers)}"
        return Cgroup({key: folder / name for key, folder in self._folders.items()}, is_v2=self._is_v2)

    def give_back(self, cgroup: Cgroup) -> bool:
        """Keep the group for another session once it is empty, or delete it. False when it cannot be deleted."""
        if len(self._free) < _MAX_FREE and cgroup.reset():
            self._free.append(cgroup)
            return True
        return cgroup.remove()

    def remove(self, *, deadline_s: float = 2.0) -> bool:
        """Delete the group and what is left of its sessions."""
        folders = [child for folder in set(self._folders.values()) for child in folder.glob("*/")]
        return _remove([*folders, *set(self._folders.values())], deadline_s)

    @property
    def folders(self) -> list[str]:
        """The folders on disk, for the janitor that cleans up after a killed service."""
        return [str(folder) for folder in set(self._folders.values())]


def open_parent(name: str) -> CgroupParent:
    """Make a group `name` below the service's, with every controller that can be written. Raises OSError."""
    places = _own_folders()
    v1 = {controller: places[controller] for controller in _CONTROLLERS if controller in places}
    made: dict[str, Path] = {}
    for controller, folder in v1.items():
        with contextlib.suppress(OSError):
            (folder / name).mkdir()
            made[controller] = folder / name
    if "memory" in made:
        return CgroupParent(made, is_v2=False)
    _remove(list(made.values()), 0.0)
    if "" not in places:
        raise OSError("no control group with a memory controller is writable")
    return _open_v2(places[""], name)


def _open_v2(own: Path, name: str) -> CgroupParent:
    available = (own / "cgroup.controllers").read_text().split()
    wanted = [controller for controller in _CONTROLLERS if controller in available]
    if "memory" not in wanted:
        raise OSError("cgroup v2 has no memory controller here")
    enable = " ".join(f"+{controller}" for controller in wanted)
    try:
        (own / "cgroup.subtree_control").write_text(enable)
    except OSError:  # a group that has processes cannot delegate controllers: move them into a leaf
        leaf = own / f"{name}-service"
        leaf.mkdir(exist_ok=True)
        for pid in (own / "cgroup.procs").read_text().split():
            (leaf / "cgroup.procs").write_text(pid)
        (own / "cgroup.subtree_control").write_text(enable)
    folder = own / name
    folder.mkdir()
    (folder / "cgroup.subtree_control").write_text(enable)
    return CgroupParent(dict.fromkeys(wanted, folder), is_v2=True)


def _own_folders() -> dict[str, Path]:
    """Controller -> folder of this process's group; the key "" is v2."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        root, mountpoint = left.split()[3:5]
        for controller in {""} if kind == "cgroup2" else set(options.split(",")) & set(_CONTROLLERS):
            inside = os.path.relpath(own.get(controller, "/"), root)
            folder = Path(mountpoint) if inside.startswith("..") else Path(mountpoint) / inside
            found[controller] = folder if folder.is_dir() else Path(mountpoint)
    return found


def _remove(folders: list[Path], deadline_s: float) -> bool:
    deadline = time.monotonic() + deadline_s
    while folders := [folder for folder in folders if not _rmdir(folder)]:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.005)
    return True


def _rmdir(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
