"""Isolation, set up from the inside: the read-only root of all sessions, then one session's namespaces and limits.

Runs in the zygote and in its children, in this order: `build_root`, `enter_user_namespace`, and in each child
`isolate_session`. Where namespaces are not available, only `confine_session` in each child. Independent of the service
and of the program that will run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import socket
import sys
from dataclasses import dataclass

from sandbox.backends import linux, processes, seccomp, uids

WORK_FOLDER = "/home/sandbox"
OWN_FOLDERS = (WORK_FOLDER, "/tmp", "/dev/shm")
"""Each a file system of the session's own, in memory."""
MAX_INODES = 10_000
"""Files and folders in each of them."""
_COVERED_FOLDER = "/.python"
SESSION_UID = 1000
"""A session's uid inside its namespace."""
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "HOME": WORK_FOLDER,
    "TMPDIR": "/tmp",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # one arena per thread would use up the address space limit
}
"""The whole environment of a session: an allow-list; nothing is inherited."""

_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_ETC_FILES = ("/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("null", "full", "random", "urandom")
_CHARGED_DEVICES = ("zero",)
"""Devices for sessions in a control group only: a shared map of zeros is memory that no process shows."""
_DIES_FIRST = 1000
_PASSWD = f"root:x:0:0:root:/:/bin/false\nsandbox:x:{SESSION_UID}:{SESSION_UID}:sandbox:{WORK_FOLDER}:/bin/false\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits that the kernel enforces for one session from the start. The cgroup adds limits on sums over processes."""

    memory_bytes: int
    num_processes: int
    disk_bytes: int  # of each of the work folder, /tmp, /dev/shm


def build_root(*, is_charged: bool) -> None:
    """Build and enter a read-only root with Python and the system's libraries. Needs CAP_SYS_ADMIN; raises OSError.

    `is_charged`: sessions run in a control group, see seccomp.program.
    """
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    sources = library_folders()
    if hidden := [source for source in sources if f"{source}/".startswith(("/dev/", "/proc/"))]:
        raise OSError(f"Python is installed in {hidden[0]}, which sessions replace by their own folder")
    root = next(path for path in ("/mnt", "/media", "/srv", "/opt", "/tmp") if _is_free(path, sources))
    linux.mount("sandbox", root, "tmpfs", linux.MS_NOSUID, "mode=755,size=1m")
    covered = _covered(sources)
    for source in sources:
        _bind(source, root + covered.get(source, source))
    _link(covered, root)
    for name in _SYSTEM_FOLDERS:
        if os.path.islink(name):
            os.symlink(os.readlink(name), root + name)
    for folder in ("/dev/shm", "/proc", "/tmp", WORK_FOLDER, "/etc"):
        os.makedirs(root + folder, mode=0o755, exist_ok=True)
    devices = (*_DEVICES, *(_CHARGED_DEVICES if is_charged else ()))
    for file in (*(f"/dev/{name}" for name in devices), *_ETC_FILES):
        if os.path.exists(file):
            _write(root + file, "")
            linux.mount(os.path.realpath(file), root + file, None, linux.MS_BIND)
    _write(root + "/etc/passwd", _PASSWD)
    _write(root + "/etc/group", f"root:x:0:\nsandbox:x:{SESSION_UID}:\n")
    os.symlink("/proc/self/fd", root + "/dev/fd")
    linux.make_readonly(root)
    # kept whole and uncovered: a user namespace may mount /proc only where one is already fully visible
    linux.mount("/proc", root + "/proc", None, linux.MS_BIND | linux.MS_REC)
    linux.pivot_into(root)


@functools.cache
def library_folders() -> list[str]:
    """Real folders that sessions may see, outermost only. Not all of sys.path, which may hold a whole checkout."""
    packages = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    wanted = {*_SYSTEM_FOLDERS, *packages, sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    real = sorted(
        path for path in wanted if os.path.isdir(path) and not (path in _SYSTEM_FOLDERS and os.path.islink(path))
    )
    return [path for path in real if not any(path.startswith(other + "/") for other in real)]


def _covered(sources: list[str]) -> dict[str, str]:
    """Library folders below a folder that each session replaces with its own -> where they are mounted instead."""
    below = [source for source in sources if f"{source}/".startswith(("/tmp/", f"{WORK_FOLDER}/"))]
    return {source: f"{_COVERED_FOLDER}/{index}" for index, source in enumerate(below)}


def _link(covered: dict[str, str], root: str = "") -> None:
    for source, target in covered.items():
        os.makedirs(os.path.dirname(root + source), exist_ok=True)
        os.symlink(target, root + source)


def _is_free(path: str, sources: list[str]) -> bool:
    return os.path.isdir(path) and not any(f"{source}/".startswith(path + "/") for source in sources)


def _bind(source: str, target: str) -> None:
    os.makedirs(target, mode=0o755, exist_ok=True)
    linux.mount(source, target, None, linux.MS_BIND | linux.MS_REC)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def enter_user_namespace(*, build: bool, first_uid: int, is_charged: bool) -> None:
    """Enter new user, pid, mount, net, ipc and uts namespaces as an unprivileged host uid. The caller forks next.

    As root, the root file system must be built already, and a helper maps the range of host uids from `first_uid` on. A
    plain user can map only its own uid, and the root file system is built inside (`build`). Raises OSError.
    """
    all_new = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        os.setgroups([])
        _unshare_mapped(linux.CLONE_NEWUSER | all_new, first_uid)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    else:
        linux.unshare(linux.CLONE_NEWUSER | all_new)
        linux.set_dumpable(True)
        _map_self(0, uid, gid)
    if build:
        build_root(is_charged=is_charged)


def _unshare_mapped(flags: int, first_uid: int) -> None:
    """Unshare while a child, which stays real root, waits to write the uid map of this process."""
    ready_read, ready_write = os.pipe()
    target = os.getpid()
    helper = os.fork()
    if helper == 0:
        os.close(ready_write)
        status = 1
        with contextlib.suppress(OSError):
            if os.read(ready_read, 1):
                for name in ("uid_map", "gid_map"):
                    _write(f"/proc/{target}/{name}", f"0 {first_uid} {uids.NUM_UIDS}")
                status = 0
        os._exit(status)
    os.close(ready_read)
    try:
        linux.unshare(flags)
        os.write(ready_write, b"1")
    finally:
        os.close(ready_write)
        _, status = os.waitpid(helper, 0)
    if status:
        raise OSError("the uid map of the sandbox could not be written")


def _map_self(inner: int, uid: int, gid: int, *, proc: str = "/proc") -> None:
    _write(f"{proc}/self/setgroups", "deny")
    _write(f"{proc}/self/uid_map", f"{inner} {uid} 1")
    _write(f"{proc}/self/gid_map", f"{inner} {gid} 1")


def die_first(*, proc: str = "/proc") -> None:
    """When the machine runs out of memory, the kernel ends this process and its children before all others."""
    _write(f"{proc}/self/oom_score_adj", str(_DIES_FIRST))


def mount_proc() -> None:
    """Mount /proc of this pid namespace over the previous one."""
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", "/proc", "proc", flags)


def isolate_session(*, uid: int, limits: SessionLimits, is_charged: bool) -> None:
    """Isolate this process, pid 1 of a fresh pid namespace: afterwards it can harm only itself. Raises OSError.

    The mounts belong to the zygote's user namespace, so the session's own namespace has no power over them, even if a
    kernel bug gave it every capability inside. `uid` is relative to the zygote's map (0 when only one uid is mapped).
    """
    # the control group that it is in becomes the root of those that it can see
    groups = linux.CLONE_NEWCGROUP
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | groups)
    zygotes_proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # its own can only be read
    _mount_session(uid, limits)
    mounts = linux.copy_of_mounts("/")
    socket.sethostname("sandbox")
    if uid:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    linux.unshare(linux.CLONE_NEWUSER)
    linux.set_dumpable(True)
    proc = f"/proc/self/fd/{zygotes_proc}"
    _map_self(SESSION_UID, uid, uid, proc=proc)
    die_first(proc=proc)
    # into mounts that its namespace does not list: /proc/self/mountinfo would show devices and folders of the host
    os.fchdir(mounts)
    os.chroot(".")
    os.close(mounts)
    os.close(zygotes_proc)
    os.chdir(WORK_FOLDER)
    set_rlimits(limits)
    linux.drop_capabilities()
    linux.no_new_privileges()
    seccomp.install(is_charged=is_charged)


def _mount_session(uid: int, limits: SessionLimits) -> None:
    """Mount what each session has of its own."""
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    size = f"size={limits.disk_bytes},nr_inodes={MAX_INODES},uid={uid},gid={uid}"
    covered = _covered(library_folders())
    for folder, mode in zip(OWN_FOLDERS, (700, 1777, 1777), strict=True):
        linux.mount("sandbox", folder, "tmpfs", flags, f"{size},mode={mode}")
    _link(covered)
    # no /proc/sys, no /proc/sysrq-trigger; nothing of itself that it could change
    linux.mount("proc", "/proc", "proc", flags | linux.MS_RDONLY, "subset=pid,hidepid=2")


def confine_session(*, uid: int, folder: str, limits: SessionLimits) -> None:
    """Isolate this process without namespaces: Landlock, a filter for shared hosts, limits. Raises OSError.

    `uid`: the host uid to change to, 0 to keep the current one. Only libraries and `folder` stay accessible. The
    program can still learn which processes exist, and the names and sizes of files.
    """
    die_first()
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    linux.die_with_parent(signal.SIGKILL)
    os.chdir(folder)
    set_rlimits(limits, num_other_tasks=0 if uid else processes.num_tasks(os.getuid()))
    linux.drop_capabilities()
    linux.no_new_privileges()
    read = linux.LANDLOCK_READ_FILE | linux.LANDLOCK_READ_DIR
    write = read | linux.LANDLOCK_WRITE_FILE | linux.LANDLOCK_TRUNCATE
    change = (
        *(linux.LANDLOCK_REMOVE_DIR, linux.LANDLOCK_REMOVE_FILE, linux.LANDLOCK_MAKE_DIR, linux.LANDLOCK_MAKE_REG),
        *(linux.LANDLOCK_MAKE_FIFO, linux.LANDLOCK_MAKE_SYM, linux.LANDLOCK_REFER),
    )
    rights = dict.fromkeys([*library_folders(), *_ETC_FILES], read)
    rights |= {f"/dev/{name}": write for name in _DEVICES}
    rights[folder] = write | sum(change)
    linux.landlock({path: right for path, right in rights.items() if os.path.exists(path)})
    seccomp.install(shares_host=True, is_charged=False)


def set_rlimits(limits: SessionLimits, *, num_other_tasks: int = 0) -> None:
    """Set limits that the process cannot raise again. `num_other_tasks`: of the same uid, which count too."""
    for name, value in {
        "RLIMIT_AS": address_space_bytes() + limits.memory_bytes,
        "RLIMIT_NPROC": limits.num_processes + num_other_tasks,
        "RLIMIT_FSIZE": limits.disk_bytes,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 1024,
    }.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def address_space_bytes(pid: int | str = "self") -> int:
    """Virtual size of a process, which includes the preloaded libraries."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
