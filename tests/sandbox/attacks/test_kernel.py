"""System calls that no program needs."""

from __future__ import annotations

import platform

import pytest

from sandbox.client import SandboxSession
from tests.sandbox.tiers import Tier

SYSCALLS = {  # number on x86_64 (None: only elsewhere), number on aarch64, arguments
    "mount": (165, 40, "b'none', b'/tmp', b'tmpfs', 0, 0"),
    "umount": (166, 39, "b'/proc', 2"),
    "fsopen": (430, 430, "b'tmpfs', 0"),
    "open_tree": (428, 428, "-100, b'/', 1"),
    "move_mount": (429, 429, "-1, b'', -1, b'', 0"),
    "unshare_user": (272, 97, "0x10000000"),
    "unshare_mount": (272, 97, "0x20000"),
    "unshare_net": (272, 97, "0x40000000"),
    "clone_user": (56, 220, "0x10000000 | 17, 0, 0, 0, 0"),
    "clone_pid": (56, 220, "0x20000000 | 17, 0, 0, 0, 0"),
    "clone_time": (56, 220, "0x80 | 17, 0, 0, 0, 0"),
    "clone_parent": (56, 220, "0x8000 | 17, 0, 0, 0, 0"),
    "clone_exit_signal": (56, 220, "18, 0, 0, 0, 0"),
    "clone_thread_with_descriptors_of_its_own": (56, 220, "0x10900, 0, 0, 0, 0"),
    "clone_process_with_shared_descriptors": (56, 220, "0x400 | 17, 0, 0, 0, 0"),
    "close_range_unshare": (436, 436, "250, 255, 2"),
    "timer_create": (222, 107, "0, 0, 0"),
    "setpgid": (109, 154, "0, 0"),
    "fcntl_setsig": (72, 25, "1, 10, 18"),
    "lease_of_a_library": (72, 25, "open(__import__('os').__file__).fileno(), 1024, 0"),
    "fcntl_notify": (72, 25, "__import__('os').open('.', 0), 1026, 0x80000002"),
    "lease_of_its_own_file": (72, 25, "__import__('os').open('f', 0o102), 1024, 1"),
    "lease_query": (72, 25, "1, 1025"),
    "delegation": (72, 25, "__import__('os').open('.', 0), 1040, b'\\0' * 8"),
    "fcntl_notify_of_libraries": (72, 25, "__import__('os').open('/usr', 0), 1026, 0x80000002"),
    "fcntl_getown": (72, 25, "1, 9"),
    "fcntl_getown_ex": (72, 25, "1, 16, b'\\0' * 8"),
    "fcntl_getsig": (72, 25, "1, 11"),
    "fcntl_seals": (72, 25, "1, 1033, 1"),
    "fcntl_write_hint": (72, 25, "1, 1036, b'\\1' + b'\\0' * 7"),
    "fcntl_ofd_lock_and_wait": (72, 25, "1, 38, b'\\0' * 32"),
    "fcntl_ofd_query": (72, 25, "1, 36, b'\\0' * 32"),
    "ioctl_asynchronous": (16, 29, "1, 0x5452, b'\\1\\0\\0\\0'"),
    "ioctl_owner_of_a_socket": (16, 29, "PAIR, 0x8901, b'\\1\\0\\0\\0'"),
    "ioctl_group_of_a_socket": (16, 29, "PAIR, 0x8902, b'\\1\\0\\0\\0'"),
    "fcntl_setown": (72, 25, "1, 8, 1"),
    "fcntl_setown_ex": (72, 25, "1, 15, b'\\1\\0\\0\\0\\1\\0\\0\\0'"),
    "fcntl_pipe_size": (72, 25, "1, 1031, 1 << 20"),
    "fcntl_ofd_lock": (72, 25, "1, 37, b'\\0' * 32"),
    "flock_of_a_device": (73, 32, "__import__('os').open('/dev/null', 2), 6"),
    "flock_of_a_folder": (73, 32, "__import__('os').open('.', 0), 5"),
    "flock": (73, 32, "open(__import__('os').__file__).fileno(), 2"),
    "socketpair_tipc": (53, 199, "30, 1, 0, b'\\0' * 8"),
    "socketpair_rds": (53, 199, "21, 5, 0, b'\\0' * 8"),
    "socketpair_inet": (53, 199, "2, 1, 0, b'\\0' * 8"),
    "attach_filter": (54, 208, "PAIR, 1, 26, b'\\0' * 16, 16"),
    "attach_bpf": (54, 208, "PAIR, 1, 50, b'\\0' * 4, 4"),
    "pass_credentials": (54, 208, "PAIR, 1, 16, b'\\1\\0\\0\\0', 4"),
    "send_buffer": (54, 208, "PAIR, 1, 7, b'\\0\\0\\1\\0', 4"),
    "option_of_tcp": (54, 208, "PAIR, 6, 2, b'\\1\\0\\0\\0', 4"),
    "peer_credentials": (55, 209, "PAIR, 1, 17, b'\\0' * 12, b'\\x0c\\0\\0\\0'"),
    "peer_pidfd": (55, 209, "PAIR, 1, 77, b'\\0' * 4, b'\\4\\0\\0\\0'"),
    "peer_groups": (55, 209, "PAIR, 1, 59, b'\\0' * 64, b'\\x40\\0\\0\\0'"),
    "urgent_send": (44, 206, "PAIR, b'x', 1, 1, 0, 0"),
    "urgent_receive": (45, 207, "PAIR, b'x', 1, 1, 0, 0"),
    "urgent_message": (46, 211, "PAIR, b'\\0' * 56, 1"),
    "urgent_receive_message": (47, 212, "PAIR, b'\\0' * 56, 1"),
    "clone3": (435, 435, "0, 0"),
    "setns": (308, 268, "3, 0"),
    "pivot_root": (155, 41, "b'.', b'.'"),
    "chroot": (161, 51, "b'/tmp'"),
    "ptrace_attach": (101, 117, "16, 1, 0, 0"),
    "ptrace_me": (101, 117, "0, 0, 0, 0"),
    "process_vm_readv": (310, 270, "1, 0, 0, 0, 0, 0"),
    "process_vm_writev": (311, 271, "1, 0, 0, 0, 0, 0"),
    "pidfd_getfd": (438, 438, "3, 0, 0"),
    "pidfd_open": (434, 434, "1, 0"),
    "kcmp": (312, 272, "1, 1, 0, 0, 0"),
    "bpf": (321, 280, "0, 0, 0"),
    "io_uring_setup": (425, 425, "8, 0"),
    "io_uring_enter": (426, 426, "0, 0, 0, 0, 0"),
    "keyctl": (250, 219, "0, -3"),
    "add_key": (248, 217, "b'user', b'a', b'b', 1, -3"),
    "request_key": (249, 218, "b'user', b'a', 0, 0"),
    "perf_event_open": (298, 241, "0, 0, -1, -1, 0"),
    "userfaultfd": (323, 282, "0"),
    "memfd_create": (319, 279, "b'x', 0"),
    "memfd_secret": (447, 447, "0"),
    "init_module": (175, 105, "0, 0, b''"),
    "finit_module": (313, 273, "0, b'', 0"),
    "kexec_load": (246, 104, "0, 0, 0, 0"),
    "reboot": (169, 142, "0xfee1dead, 672274793, 0, 0"),
    "swapon": (167, 224, "b'/x', 0"),
    "acct": (163, 89, "b'/x'"),
    "syslog": (103, 116, "3, 0, 0"),
    "setuid": (105, 146, "0"),
    "setgid": (106, 144, "0"),
    "setgroups": (116, 159, "0, 0"),
    "capset": (126, 91, "0, 0"),
    "clock_settime": (227, 112, "0, 0"),
    "settimeofday": (164, 170, "0, 0"),
    "adjtimex": (159, 171, "0"),
    "sethostname": (170, 161, "b'x', 1"),
    "personality": (135, 92, "0x40000"),
    "open_by_handle_at": (304, 265, "-1, 0, 0"),
    "name_to_handle_at": (303, 264, "-100, b'/', 0, 0, 0"),
    "execve": (59, 221, "b'/bin/true', 0, 0"),
    "execveat": (322, 281, "-100, b'/bin/true', 0, 0, 0"),
    "shmget": (29, 194, "0, 10**6, 0o1600"),
    "semget": (64, 190, "0, 1, 0o1600"),
    "msgget": (68, 186, "0, 0o1600"),
    "mq_open": (240, 180, "b'x', 0o102, 0o600, 0"),
    "quotactl": (179, 60, "0, 0, 0, 0"),
    "fanotify_init": (300, 262, "0, 0"),
    "inotify_init": (253, None, ""),
    "inotify_init1": (294, 26, "0x80000"),
    "huge_pages": (9, 222, "0, 2 << 20, 3, 0x40022, -1, 0"),
    "lookup_dcookie": (212, 18, "0, 0, 0"),
    "move_pages": (317, 239, "1, 0, 0, 0, 0, 0"),
    "mbind": (237, 235, "0, 0, 0, 0, 0, 0"),
    "seccomp": (317, 277, "0, 0, 0"),
    "landlock": (444, 444, "0, 0, 1"),
    "modify_ldt": (154, None, "0, 0, 0"),
    "iopl": (172, None, "3"),
    "ioperm": (173, None, "0, 1024, 1"),
    "vhangup": (153, 58, ""),
    "x32": (0x40000000 + 39, None, ""),
    "unknown": (5000, 5000, ""),
    "tiocsti": (16, 29, "0, 0x5412, b'x'"),
    "ioctl_fs": (16, 29, "1, 0x40086602, 0"),
    "prctl_seccomp": (157, 167, "22, 0, 0, 0, 0"),
    "prctl_dumpable": (157, 167, "4, 1, 0, 0, 0"),
    "prctl_ptracer": (157, 167, "0x59616d61, -1, 0, 0, 0"),
    "prctl_no_new_privs": (157, 167, "38, 0, 0, 0, 0"),
    "socket_inet": (41, 198, "2, 1, 0"),
    "socket_netlink": (41, 198, "16, 3, 0"),
    "socket_packet": (41, 198, "17, 3, 0"),
}


@pytest.mark.parametrize("name", SYSCALLS)
async def test_the_kernels_doors_are_shut(isolated: Tier, session: SandboxSession, name: str) -> None:
    x86_64, aarch64, arguments = SYSCALLS[name]
    number = {"x86_64": x86_64, "aarch64": aarch64}[platform.machine()]
    if number is None:
        pytest.skip("this machine has no such call")
    code = (
        "import ctypes, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "pair = socket.socketpair(); PAIR = pair[0].fileno()\n"
        f"result = libc.syscall({number}, {arguments})\nresult, ctypes.get_errno()"
    )
    assert (await session.exec(code)).result in {"(-1, 1)", "(-1, 38)"}  # EPERM, ENOSYS


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an interface of x86_64")
async def test_the_old_system_call_gate_kills(isolated: Tier, session: SandboxSession) -> None:
    """int 0x80 uses other system call numbers than the filter does."""
    code = (
        "import ctypes, mmap\npage = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)\n"
        "page.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')\n"
        "ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()"
    )
    result = await session.exec(code)
    assert (result.status, result.exit_code) == (
        "crashed",
        -31,
    ) or result.exit_code == -11  # SIGSYS; no such gate at all


async def test_no_capability_and_an_unprivileged_uid(isolated: Tier, session: SandboxSession) -> None:
    uids = await session.exec(
        "import os; os.getuid() > 0 and len({*os.getresuid(), *os.getresgid()}) == 1, len(os.getgroups())"
    )
    assert uids.result in {"(True, 0)", "(True, 1)"}
    if isolated.num_visible_pids is None:
        return  # /proc is closed to it
    result = await session.exec("print(open('/proc/self/status').read())")
    status = dict(line.split(":\t", 1) for line in result.stdout.splitlines() if ":\t" in line)
    assert {status[key].strip() for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["Seccomp"].strip(), status["NoNewPrivs"].strip()) == ("2", "1")


async def test_what_python_does_with_descriptors_is_allowed(isolated: Tier, session: SandboxSession) -> None:
    code = (
        "import asyncio, fcntl, os, socket, sqlite3\n"
        "async def wait(): await asyncio.sleep(0); return 1\n"
        "a, b = socket.socketpair(); a.settimeout(1); a.sendall(b'x'); assert b.recv(1) == b'x'\n"
        "assert a.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0\n"
        "copy = os.dup(1); fcntl.fcntl(copy, fcntl.F_SETFD, fcntl.FD_CLOEXEC)\n"
        "file = open('f', 'w'); fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "database = sqlite3.connect('d'); database.execute('create table t (x)'); database.commit()\n"
        "asyncio.run(wait())"
    )
    assert (await session.exec(code, timeout_s=10)).result == "1"


async def test_what_programs_do_with_memory_and_files_is_allowed(isolated: Tier, session: SandboxSession) -> None:
    code = (
        "import mmap, os, shutil, sqlite3, tempfile, threading\nimport numpy as np\n"
        "private = mmap.mmap(-1, 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); private[:4] = b'abcd'\n"
        "array = np.memmap('array', dtype='f8', mode='w+', shape=(1000,)); array[:] = 1; array.flush()\n"
        "shutil.copyfile('array', 'copy'); assert np.fromfile('copy').sum() == 1000\n"
        "with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile(dir=folder) as file: file.write(b'x')\n"
        "database = sqlite3.connect('d'); database.execute('pragma journal_mode=wal')\n"
        "with database: database.execute('create table t (x)'); database.execute('insert into t values (1)')\n"
        "assert sqlite3.connect('d').execute('select * from t').fetchall() == [(1,)]\n"
        "threads = [threading.Thread(target=sum, args=(range(9),)) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0: array[0] = 5; os.write(write, b'y'); os._exit(0)\n"
        "os.wait(); os.read(read, 1), array[0] == 5"
    )
    assert (await session.exec(code, timeout_s=30)).result == "(b'y', np.True_)"


async def test_processes_that_share_memory_are_allowed(isolated: Tier, session: SandboxSession) -> None:
    if not isolated.has_own_folders:
        pytest.skip("/dev/shm is closed, where Python keeps semaphores")
    code = (
        "import multiprocessing, concurrent.futures\nfork = multiprocessing.get_context('fork')\n"
        "number, numbers, queue = fork.Value('i'), fork.Array('d', 100_000), fork.Queue()\n"
        "def work():\n  with number.get_lock(): number.value += 1\n  numbers[7] = 3; queue.put('done')\n"
        "workers = [fork.Process(target=work) for _ in range(3)]\n[w.start() for w in workers]\n"
        "words = {queue.get() for w in workers}; [w.join() for w in workers]\n"
        "with concurrent.futures.ProcessPoolExecutor(2, mp_context=fork) as pool: squares = list(pool.map(abs, [-3, 4]))\n"
        "number.value, numbers[7], words, squares"
    )
    assert (await session.exec(code, timeout_s=30)).result == "(3, 3.0, {'done'}, [3, 4])"
