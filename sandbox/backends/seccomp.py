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
_EXIT_SIGNAL_MASK, _SIGCHLD = 0xFF, 17
_F_SETSIG = 10
_AF_UNIX = 1
_STREAMS = [1 | flags for flags in (0, 0x800, 0x80000, 0x80800)]  # SOCK_STREAM, perhaps non-blocking, close-on-exec
_IOCTLS = [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
_PRCTLS = [3, 15, 16, 0x53564D41]  # GET_DUMPABLE SET_NAME GET_NAME SET_VMA

_SECCOMP_MODE_FILTER, _PR_SET_SECCOMP = 2, 22

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


@functools.cache
def program(machine: str, *, shares_host: bool = False) -> bytes:
    """The filter as `struct sock_filter[]`. Raises KeyError for a machine without a table.

    `shares_host`: the process has no namespaces, so calls that act on others by path or pid are refused too.
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
    for number in syscalls.allowed(machine, shares_host=shares_host):
        code += [(_JEQ, 0, 1, number), (_RET, 0, 0, _ALLOW)]
    code += _when(special["clone3"], [(_RET, 0, 0, _ERRNO | errno.ENOSYS)])  # libc falls back to clone
    flags = [_argument(0), (_JSET, 3, 0, _NAMESPACE_FLAGS | _CLONE_PARENT), (_AND, 0, 0, _EXIT_SIGNAL_MASK)]
    exit_signal: list[Instruction] = [(_JEQ, 2, 0, 0), (_JEQ, 1, 0, _SIGCHLD), refuse, (_RET, 0, 0, _ALLOW)]
    code += _when(special["clone"], [*flags, *exit_signal])
    code += _when(special["fcntl"], [_argument(1), (_JEQ, 0, 1, _F_SETSIG), refuse, (_RET, 0, 0, _ALLOW)])
    families = [] if shares_host else [_AF_UNIX]  # a socket with a path may belong to any program
    by_value = [(special["socket"], 0, families), (special["ioctl"], 1, _IOCTLS), (special["prctl"], 0, _PRCTLS)]
    if shares_host:
        by_value.append((syscalls.number_of(machine, "prlimit64"), 0, [0]))  # pid 0: itself
        by_value.append((syscalls.number_of(machine, "socketpair"), 1, _STREAMS))  # datagrams could go to any path
    for number, argument, values in by_value:
        body = [_argument(argument)]
        for value in values:
            body += [(_JEQ, 0, 1, value), (_RET, 0, 0, _ALLOW)]
        code += _when(number, [*body, refuse])
    code.append(refuse)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _argument(index: int) -> Instruction:
    """Load the low half of an argument (both machines are little-endian). The kernel ignores the rest of an int."""
    return (_LOAD, 0, 0, _OFFSET_ARGS + 8 * index)


def _when(number: int, body: list[Instruction]) -> list[Instruction]:
    """Run `body`, which must return, for the call `number`."""
    return [(_JEQ, 0, len(body), number), *body]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(*, shares_host: bool = False) -> None:
    """Install the filter on this thread and its descendants. Needs no_new_privileges() first. Raises OSError."""
    code = program(os.uname().machine, shares_host=shares_host)
    buffer = ctypes.create_string_buffer(code, len(code))
    block = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    arguments = [ctypes.c_long(_SECCOMP_MODE_FILTER), ctypes.byref(block), ctypes.c_long(0), ctypes.c_long(0)]
    if linux.libc().prctl(_PR_SET_SECCOMP, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "prctl(SECCOMP) refused the filter")
