"""Linux calls that Python does not wrap, each as one function that raises OSError. Independent of sandboxes."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Mapping

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_SYS_OPEN_TREE, _SYS_MOUNT_SETATTR = 428, 442
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446  # the same on every machine
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_OPEN_TREE_CLONE = 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 38, 36

# Access rights of Landlock, from its file system ABI 1 on; ABI 2 adds REFER, 3 TRUNCATE, 5 IOCTL_DEV.
LANDLOCK_WRITE_FILE, LANDLOCK_READ_FILE, LANDLOCK_READ_DIR = 1 << 1, 1 << 2, 1 << 3
LANDLOCK_REMOVE_DIR, LANDLOCK_REMOVE_FILE = 1 << 4, 1 << 5
LANDLOCK_MAKE_DIR, LANDLOCK_MAKE_REG, LANDLOCK_MAKE_FIFO, LANDLOCK_MAKE_SYM = 1 << 7, 1 << 8, 1 << 10, 1 << 12
LANDLOCK_REFER, LANDLOCK_TRUNCATE = 1 << 13, 1 << 14
_LANDLOCK_FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # ABI -> number of rights; none was added up to ABI 7
_LANDLOCK_NET, _LANDLOCK_SCOPES = 0b11, 0b11  # bind and connect of TCP; abstract sockets and signals


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library of this process."""
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _long(*values: int) -> list[ctypes.c_long]:
    return [ctypes.c_long(value) for value in values]


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags` for new ones."""
    _check(libc().unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, flags: int) -> None:
    """Join the namespace behind `fd`."""
    _check(libc().setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    arguments = [text.encode() if text is not None else None for text in (source, target, kind)]
    _check(libc().mount(*arguments, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def make_readonly(path: str) -> None:
    """Make the mount at `path` and all below it read-only, without setuid and devices (Linux 5.12)."""
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID, 0, 0, 0)
    arguments = [*_long(_SYS_MOUNT_SETATTR, _AT_FDCWD), path.encode(), *_long(_AT_RECURSIVE)]
    _check(libc().syscall(*arguments, ctypes.byref(attributes), ctypes.c_long(32)), f"mount_setattr {path}")


def pivot_into(path: str) -> None:
    """Make `path` the root and unmount the old root."""
    os.chdir(path)
    _check(libc().syscall(*_long(_SYS_PIVOT_ROOT[os.uname().machine]), b".", b"."), "pivot_root")
    _check(libc().umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def copy_of_mounts(path: str) -> int:
    """A descriptor of a copy of the mounts at and below `path`, which belongs to no mount namespace."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
    fd = int(libc().syscall(*_long(_SYS_OPEN_TREE, _AT_FDCWD), path.encode(), *_long(flags)))
    _check(fd, f"open_tree {path}")
    return fd


def die_with_parent(signum: int) -> None:
    """Ask the kernel for `signum` when the thread that made this process ends. A change of uid cancels this."""
    _check(libc().prctl(_PR_SET_PDEATHSIG, *_long(signum, 0, 0, 0)), "prctl(PDEATHSIG)")


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process."""
    _check(libc().prctl(_PR_SET_CHILD_SUBREAPER, *_long(1, 0, 0, 0)), "prctl(CHILD_SUBREAPER)")


def set_dumpable(value: bool) -> None:
    """Set whether processes of the same uid may inspect this one. A change of uid clears it."""
    _check(libc().prctl(_PR_SET_DUMPABLE, *_long(int(value), 0, 0, 0)), "prctl(DUMPABLE)")


def no_new_privileges() -> None:
    """From now on no exec raises privileges. A plain user needs this to install a filter."""
    _check(libc().prctl(_PR_SET_NO_NEW_PRIVS, *_long(1, 0, 0, 0)), "prctl(NO_NEW_PRIVS)")


def drop_capabilities() -> None:
    """Empty every capability set, the bounding set first."""
    for capability in range(64):
        if libc().prctl(_PR_CAPBSET_DROP, *_long(capability, 0, 0, 0)) < 0:
            break  # past the last capability this kernel knows
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    empty = (ctypes.c_uint32 * 6)()
    number = _SYS_CAPSET[os.uname().machine]
    _check(libc().syscall(*_long(number), ctypes.byref(header), ctypes.byref(empty)), "capset")


def landlock_abi() -> int:
    """The version of Landlock that this kernel enforces; 0 when it has none or it is switched off."""
    return max(int(libc().syscall(*_long(_SYS_LANDLOCK_CREATE), None, *_long(0, 1))), 0)


def landlock(allowed: Mapping[str, int]) -> None:
    """Refuse this process and its future children every right on files except those in `allowed`, by path.

    A path includes everything below it; rights that a file cannot have are left out. Also refuses TCP (ABI 4), abstract
    sockets, and signals to processes outside (ABI 6). Needs no_new_privileges() first. Raises OSError.
    """
    abi = landlock_abi()
    handled = (1 << _LANDLOCK_FS_BITS[min(abi, 5)]) - 1
    fields = [handled] + [_LANDLOCK_NET] * (abi >= 4) + [_LANDLOCK_SCOPES] * (abi >= 6)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = libc().syscall(*_long(_SYS_LANDLOCK_CREATE), attributes, *_long(len(attributes), 0))
    _check(ruleset, "landlock_create_ruleset")
    try:
        for path, rights in allowed.items():
            _landlock_allow(ruleset, path, rights & handled)
        _check(libc().syscall(*_long(_SYS_LANDLOCK_RESTRICT, ruleset, 0)), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _landlock_allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= LANDLOCK_READ_FILE | LANDLOCK_WRITE_FILE | LANDLOCK_TRUNCATE
        rule = struct.pack("=Qi", rights, fd)
        _check(libc().syscall(*_long(_SYS_LANDLOCK_ADD, ruleset, 1), rule, *_long(0)), f"landlock rule for {path}")
    finally:
        os.close(fd)
