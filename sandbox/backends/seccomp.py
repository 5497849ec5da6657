"""Builds and installs the system call filter of a session: an allow-list in classic BPF.

This is our own code because the Python bindings of libseccomp are unmaintained and need the C library on the machine.
Independent of namespaces.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct

from sandbox.backends import linux, syscalls

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

_LOAD, _AND, _JEQ, _JGE, _JSET, _RET = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_NAMESPACE_FLAGS = 0x7E020080  # CLONE_NEW* of clone(2), time included
_CLONE_PARENT = 0x8000  # makes a sibling of the session, which would not be counted to it
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000  # threads share descriptors, processes do not: one listing each counts all
_CLOSE_RANGES = [0, 4]  # and CLOSE_RANGE_CLOEXEC; not: a table of descriptors for this thread alone
_EXIT_SIGNAL_MASK, _SIGCHLD = 0xFF, 17
# F_DUPFD GETFD SETFD GETFL SETFL, record locks (sqlite), F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Not: leases, notifications of
# files that other programs use, signals for descriptors, larger pipes.
_FCNTLS = [0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032]
_SOL_SOCKET, _MSG_OOB = 1, 1
_SET_OPTIONS = [2, 20, 21]  # SO_REUSEADDR RCVTIMEO SNDTIMEO
_GET_OPTIONS = [2, 3, 4, 7, 8, 20, 21, 30, 38, 39]  # and TYPE ERROR SNDBUF RCVBUF ACCEPTCONN PROTOCOL DOMAIN
_FLAGS_ARGUMENT = {"sendto": 3, "recvfrom": 3, "sendmsg": 2, "recvmsg": 2}
_AF_UNIX = 1
_STREAMS = [1 | flags for flags in (0, 0x800, 0x80000, 0x80800)]  # SOCK_STREAM, perhaps non-blocking, close-on-exec
_IOCTLS = [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000
_PRCTLS = [3, 15, 16, 0x53564D41]  # GET_DUMPABLE SET_NAME GET_NAME SET_VMA

_SECCOMP_MODE_FILTER, _PR_SET_SECCOMP = 2, 22

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


@functools.cache
def program(machine: str, *, shares_host: bool = False, is_charged: bool = True) -> bytes:
    """The filter as `struct sock_filter[]`. Raises KeyError for a machine without a table.

    `shares_host`: the process has no namespaces, so calls that act on others by path or pid are refused too.
    `is_charged`: a control group charges the session for memory that the kernel holds for it. Where none does, only
    what the watchdog can count is left: no shared memory without a file, no queue of a socket hidden behind another.
    """
    special = syscalls.CONDITIONAL[machine]
    refuse: Instruction = (_RET, 0, 0, _ERRNO | errno.EPERM)
    code: list[Instruction] = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JEQ, 1, 0, _AUDIT_ARCH[machine]),
        (_RET, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _OFFSET_NR),
        (_JGE, 0, 1, _X32_BIT),
        refuse,
    ]
    for number in syscalls.allowed(machine, shares_host=shares_host, is_charged=is_charged):
        code += [(_JEQ, 0, 1, number), (_RET, 0, 0, _ALLOW)]
    code += _when(special["clone3"], [(_RET, 0, 0, _ERRNO | errno.ENOSYS)])  # libc falls back to clone
    flags: list[Instruction] = [
        _argument(0),
        (_JSET, 6, 0, _NAMESPACE_FLAGS | _CLONE_PARENT),
        (_JSET, 1, 0, _CLONE_THREAD),
        (_JSET, 4, 1, _CLONE_FILES),
        (_JSET, 0, 3, _CLONE_FILES),
        (_AND, 0, 0, _EXIT_SIGNAL_MASK),
    ]
    exit_signal: list[Instruction] = [(_JEQ, 2, 0, 0), (_JEQ, 1, 0, _SIGCHLD), refuse, (_RET, 0, 0, _ALLOW)]
    code += _when(special["clone"], [*flags, *exit_signal])
    has_names = is_charged and not shares_host  # a socket with a path may belong to any program
    families = [_AF_UNIX] if has_names else []
    by_value = [(special["socket"], 0, families), (special["ioctl"], 1, _IOCTLS), (special["prctl"], 0, _PRCTLS)]
    by_value.append((special["fcntl"], 1, _FCNTLS))
    by_value.append((syscalls.number_of(machine, "close_range"), 2, _CLOSE_RANGES))
    if shares_host:
        by_value.append((syscalls.number_of(machine, "prlimit64"), 0, [0]))  # pid 0: itself
    for number, argument, values in by_value:
        code += _when(number, [*_one_of(argument, values), refuse])
    code += _sockets(machine, has_names=has_names)
    code += _when(syscalls.number_of(machine, "mmap"), _maps(is_charged=is_charged))
    code.append(refuse)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _maps(*, is_charged: bool) -> list[Instruction]:
    """Refuse huge pages, which the host has set aside for others and no limit on memory counts.

    Without `is_charged` also MAP_SHARED with MAP_ANONYMOUS: what remains mapped of it does not tell how much the kernel
    keeps.
    """
    refuse: Instruction = (_RET, 0, 0, _ERRNO | errno.EPERM)
    allow: Instruction = (_RET, 0, 0, _ALLOW)
    code: list[Instruction] = [_argument(3), (_JSET, 0, 1, _MAP_HUGETLB), refuse]
    if not is_charged:
        code += [(_JSET, 0, 2, _MAP_ANONYMOUS), (_JSET, 0, 1, _MAP_SHARED), refuse]
    return [*code, allow]


def _sockets(machine: str, *, has_names: bool) -> list[Instruction]:
    """The rules for calls on socket pairs: AF_UNIX only, few options, no urgent data.

    Without `has_names` only pairs of streams, whose two ends hold all that was sent, and no sending of descriptors.
    """
    refuse: Instruction = (_RET, 0, 0, _ERRNO | errno.EPERM)
    allow: Instruction = (_RET, 0, 0, _ALLOW)
    kinds = [allow] if has_names else [*_one_of(1, _STREAMS), refuse]  # datagrams could go to any path
    code = _when(syscalls.number_of(machine, "socketpair"), [_argument(0), (_JEQ, 1, 0, _AF_UNIX), refuse, *kinds])
    for name, options in (("setsockopt", _SET_OPTIONS), ("getsockopt", _GET_OPTIONS)):
        level = [_argument(1), (_JEQ, 1, 0, _SOL_SOCKET), refuse]
        code += _when(syscalls.number_of(machine, name), [*level, *_one_of(2, options), refuse])
    for name, argument in _FLAGS_ARGUMENT.items():
        if has_names or name != "sendmsg":  # it could name any path, and hide descriptors in a queue
            body = [_argument(argument), (_JSET, 0, 1, _MSG_OOB), refuse, allow]
            code += _when(syscalls.number_of(machine, name), body)
    return code


def _one_of(argument: int, values: list[int]) -> list[Instruction]:
    """Allow the call when the argument has one of these values; falls through otherwise."""
    code = [_argument(argument)]
    for value in values:
        code += [(_JEQ, 0, 1, value), (_RET, 0, 0, _ALLOW)]
    return code


def _argument(index: int) -> Instruction:
    """Load the low half of an argument (both machines are little-endian). The kernel ignores the rest of an int."""
    return (_LOAD, 0, 0, _OFFSET_ARGS + 8 * index)


def _when(number: int, body: list[Instruction]) -> list[Instruction]:
    """Run `body`, which must return, for the call `number`."""
    return [(_JEQ, 0, len(body), number), *body]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(*, shares_host: bool = False, is_charged: bool = True) -> None:
    """Install the filter on this thread and its descendants. Needs no_new_privileges() first. Raises OSError."""
    code = program(os.uname().machine, shares_host=shares_host, is_charged=is_charged)
    buffer = ctypes.create_string_buffer(code, len(code))
    block = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    arguments = [ctypes.c_long(_SECCOMP_MODE_FILTER), ctypes.byref(block), ctypes.c_long(0), ctypes.c_long(0)]
    if linux.libc().prctl(_PR_SET_SECCOMP, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "prctl(SECCOMP) refused the filter")
