"""Access to files of the host and of the system, and to files that an earlier session left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sandbox.client import SandboxClient, SandboxSession
from tests.sandbox.conftest import TOKEN
from tests.sandbox.tiers import SECRET, Tier

SECRETS = {
    "environ": "import os; str(dict(os.environ))",
    "own_environ": "open('/proc/self/environ').read()",
    "proc_environ": "open('/proc/1/environ').read()",
    "parent_environ": "import os; open(f'/proc/{os.getppid()}/environ').read()",
    "all_environs": "import glob; ''.join(open(p, errors='replace').read() for p in glob.glob('/proc/*/environ'))",
    "each_environ": "out = ''\nfor p in range(1, 40000):\n  try: out += open(f'/proc/{p}/environ').read()\n  except OSError: pass\nout",
    "roots": "out = []\nimport os\nfor p in range(1, 40000):\n  try: out.append(os.listdir(f'/proc/{p}/root/root'))\n"
    "  except OSError: pass\nprint(out)\nassert not out",
    "cmdlines": "out = ''\nfor p in range(1, 40000):\n  try: out += open(f'/proc/{p}/cmdline').read()\n  except OSError: pass\nout",
    "through_root": "open('/proc/1/root/proc/1/environ').read()",
    "environb": "import os; os.environb",
    "c_environ": "import ctypes; e = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\n"
    "i = 0\nwhile e[i]: print(e[i]); i += 1",
    "own_memory": "out = b''\nfor line in open('/proc/self/maps'):\n  a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
    "  if 'rw' in line and b - a < 2**24:\n    m = open('/proc/self/mem', 'rb', 0); m.seek(a)\n    d = m.read(b - a)\n"
    "    i = d.find(b'secret-of-the-' + b'host')\n    if i >= 0: print(d[i:i + 40])",
    "walk": "import statistics; statistics.sys.modules['os'].environ",
}


@pytest.mark.parametrize("name", SECRETS)
async def test_the_hosts_secrets_are_not_there(isolated: Tier, session: SandboxSession, name: str) -> None:
    said = (await session.exec(SECRETS[name], timeout_s=10)).model_dump_json()
    assert not any(secret in said for secret in (SECRET, TOKEN, "TEST_TOKENS", "HOST_SECRET"))


HOST_FILES = [
    *("/etc/shadow", "/etc/gshadow", "/root/.bashrc", "/root/.ssh/id_rsa", "/home/user/.netrc", str(Path(__file__))),
    *("/proc/kcore", "/proc/kallsyms", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/kmsg"),
    *("/sys/kernel/uevent_helper", "/sys/kernel/debug", "/sys/fs/cgroup/cgroup.procs", "/sys/power/state"),
    *("/var/run/docker.sock", "/run/containerd/containerd.sock", "/dev/mem", "/dev/kmem", "/dev/port", "/dev/kvm"),
    *("/dev/vda", "/dev/sda", "/dev/fuse", "/dev/net/tun", "/dev/tty", "/dev/ptmx", "/dev/loop0", "/dev/console"),
]
HARMLESS_IN_CONTAINERS = {"/proc/kcore", "/proc/kallsyms", "/dev/ptmx"}
"""Covered by /dev/null; without addresses; a terminal of its own."""
READABLE_IN_CONTAINERS = {"/proc/sys/kernel/core_pattern", "/sys/power/state"}


@pytest.mark.parametrize("path", HOST_FILES)
async def test_host_files_are_not_there(isolated: Tier, session: SandboxSession, path: str) -> None:
    for mode in ("rb", "r+b", "ab"):
        if isolated.backend == "docker" and path in HARMLESS_IN_CONTAINERS:
            continue
        if isolated.backend == "docker" and path in READABLE_IN_CONTAINERS and mode == "rb":
            continue
        result = await session.exec(
            f"open({path!r}, {mode!r})"
        )  # opened only: nothing is written to a kernel's setting
        assert result.status == "error", mode


@pytest.mark.parametrize(
    "folder", ["/", "/usr", "/usr/lib", "/etc", "/dev", "/home", "/var", "/opt", "/root", "/run", "/sys", "/proc"]
)
async def test_everything_else_is_read_only(isolated: Tier, session: SandboxSession, folder: str) -> None:
    for code in (
        f"open('{folder}/x', 'w')",
        f"import os; os.mkdir('{folder}/x')",
        f"import os; os.symlink('/', '{folder}/x')",
    ):
        assert (await session.exec(code)).status == "error"


CHANGES = {
    "chmod": "import os, sys; os.chmod(sys.prefix, 0o777)",
    "chmod_file": "import os; os.chmod(os.__file__, 0o777)",
    "utime": "import os; os.utime(os.__file__)",
    "truncate": "import os; os.truncate(os.__file__, 0)",
    "remove": "import os; os.remove(os.__file__)",
    "rename": "import os; os.rename(os.__file__, 'mine')",
    "link": "import os; os.link(os.__file__, 'mine')",
    "append": "import os; open(os.__file__, 'a')",
    "chown": "import os; os.chown('.', 0, 0)",
    "setxattr": "import os; os.setxattr(os.__file__, 'user.x', b'1')",
    "mknod": "import os, stat; os.mknod('d', 0o600 | stat.S_IFBLK, os.makedev(8, 0))",
    "setuid_bit": "import os; open('s', 'w'); os.chmod('s', 0o4755); import subprocess; subprocess.run(['./s'])",
}


@pytest.mark.parametrize("name", CHANGES)
async def test_the_libraries_cannot_be_changed(isolated: Tier, session: SandboxSession, name: str) -> None:
    assert (await session.exec(CHANGES[name])).status == "error"


LEAVE = (
    "import os\nfor d in ('/tmp', '/dev/shm', '.', os.environ['TMPDIR'], os.environ['HOME'], '/var/tmp', '/run'):\n"
    "  for leave in (lambda: open(d + '/left', 'w').write('x'), lambda: os.mkfifo(d + '/left-pipe'), "
    "lambda: os.mkdir(d + '/left-folder', 0)):\n    try: leave()\n    except OSError: pass\n"
)


async def test_the_next_session_finds_nothing(isolated: Tier, client: SandboxClient) -> None:
    look = (
        "import os\nfound = []\nfor d in ('/tmp', '/dev/shm', '.', os.environ['TMPDIR'], '/var/tmp', '/run'):\n"
        "  try: found += [n for n in os.listdir(d) if 'left' in n]\n  except OSError: pass\nfound, 'x' in globals()"
    )
    async with client.session() as first:
        await first.exec(LEAVE + "x = 1")
    async with client.session() as second:
        assert (await second.exec(look)).result == "([], False)"
        # a Python installed below /tmp is linked there in every session
        python = [Path(sys.prefix).parts[2]] if sys.prefix.startswith("/tmp/") else []
        if isolated.has_own_folders and isolated.backend != "docker":
            assert (await second.exec("sorted(os.listdir('/tmp'))")).result == str(python)


async def test_a_restarted_interpreter_finds_only_its_own_files(session: SandboxSession) -> None:
    await session.exec("import os; open('left', 'w').close(); os._exit(1)")
    after = await session.exec("import os; os.listdir('.')")
    assert (after.result, after.state_lost) == ("[]", True)


TRICKS = {
    "link": "import os; os.symlink('/etc/passwd', 'x')",
    "relative_link": "import os; os.symlink('../../../../etc/passwd', 'x')",
    "pipe": "import os; os.mkfifo('x')",
    "folder": "import os; os.mkdir('x')",
    "closed": "import os; os.close(os.open('x', os.O_CREAT, 0))",
    "proc": "import os; os.symlink('/proc/self/environ', 'x')",
}


@pytest.mark.parametrize("name", TRICKS)
async def test_files_are_not_fetched_through_tricks(session: SandboxSession, name: str) -> None:
    if (await session.exec(TRICKS[name])).status == "error":
        assert name == "pipe"  # refused at the root
        return
    try:
        assert await session.get_file("x") == b""  # root reads what it closed to itself
    except ValueError:
        pass
    else:
        assert name == "closed"
    if name != "closed":
        with pytest.raises(ValueError):
            await session.put_file("x", b"y")
        with pytest.raises(ValueError):
            await session.put_file("x/y" if name != "folder" else "x", b"y")


async def test_a_folder_swapped_for_a_link_during_transfers_leads_nowhere(session: SandboxSession) -> None:
    swap = (
        "import os, threading, time\nos.mkdir('a'); os.mkdir('b')\n"
        "def f():\n  while True:\n    try:\n      os.rename('a', 'c'); os.symlink('/tmp', 'a')\n"
        "      os.remove('a'); os.rename('c', 'a')\n    except OSError: pass\n"
        "threading.Thread(target=f, daemon=True).start()"
    )
    await session.exec(swap)
    for _ in range(20):
        try:
            await session.put_file("a/swapped", b"x")
        except ValueError:
            continue
    assert not Path("/tmp/swapped").exists()
