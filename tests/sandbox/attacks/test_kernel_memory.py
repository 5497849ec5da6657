"""Programs that hold memory in the kernel's name: in no process's resident set, behind descriptors, maps and queues.

Each tries to hold more than its session may, and then keeps it until it is ended.
"""

from __future__ import annotations

import pytest

from sandbox.client import SandboxClient
from sandbox.protocol import Limits
from tests.sandbox.attacks.conftest import Healthy
from tests.sandbox.tiers import Tier

LIMIT_BYTES = 48 * 1024**2
PRELUDE = f"""
import array, contextlib, ctypes, mmap, os, select, socket, tempfile, time
LIMIT, ENOUGH = {LIMIT_BYTES}, {3 * LIMIT_BYTES // 2}
held, kept, libc = 0, [], ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p

def fill(end):
    global held
    end.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True: held += end.send(bytes(65536))

def in_children(hold, num_children=12):
    \"\"\"What the children hold, summed up, once each has reported or ended.\"\"\"
    read, write = os.pipe()
    os.set_blocking(read, False)
    for _ in range(num_children):
        if os.fork() == 0:
            with contextlib.suppress(Exception): hold()
            os.write(write, held.to_bytes(8, 'big'))
            time.sleep(600)
    total = num_done = 0
    while num_done < num_children:
        with contextlib.suppress(BlockingIOError):
            total += int.from_bytes(os.read(read, 8), 'big'); num_done += 1
        num_done += os.waitpid(-1, os.WNOHANG)[0] > 0
        time.sleep(0.001)
    return total

def keep(num_bytes, enough=ENOUGH):
    \"\"\"Wait for the end, when this was enough to deserve it.\"\"\"
    if num_bytes > enough: time.sleep(600)
    print('held', num_bytes)
"""
HOLDERS = {
    "socketpairs": """
def hold():
    for _ in range(100):
        kept.append(socket.socketpair())
        for end in kept[-1]: fill(end)
keep(in_children(hold))""",
    "halves_of_socketpairs": """
def hold():
    for _ in range(200):
        a, b = socket.socketpair()
        fill(a); a.close(); kept.append(b)
keep(in_children(hold))""",
    "datagrams": """
def hold():
    for _ in range(100):
        kept.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        for end in kept[-1]: fill(end)
keep(in_children(hold))""",
    "packets": """
def hold():
    for _ in range(100):
        kept.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        for end in kept[-1]: fill(end)
keep(in_children(hold))""",
    "connections_nobody_accepts": """
server = socket.socket(socket.AF_UNIX); server.bind('s'); server.listen(4096)
with contextlib.suppress(OSError):
    for _ in range(2000):
        client = socket.socket(socket.AF_UNIX); client.setblocking(False); client.connect('s'); fill(client); client.close()
keep(held)""",
    "letters_to_one_receiver": """
for number in range(120):
    kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)); kept[-1].bind(f'r{number}')
    with contextlib.suppress(OSError):
        for _ in range(16):
            sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); sender.setblocking(False)
            held += sender.sendto(bytes(150_000), f'r{number}'); sender.close()
keep(held)""",
    "descriptors_in_flight": """
def hold():
    a, b = socket.socketpair()
    kept.append((a, b))
    for _ in range(200):
        c, d = socket.socketpair()
        fill(c)
        socket.send_fds(a, [b'x'], [d.fileno()])
        c.close(); d.close()
keep(in_children(hold))""",
    "pages_unmapped_from_a_shared_map": """
while held <= ENOUGH:
    kept.append(libc.mmap(None, ctypes.c_size_t(2**25), 3, 0x21, -1, ctypes.c_long(0)))
    if kept[-1] in (None, 2**64 - 1): break
    ctypes.memset(ctypes.c_void_p(kept[-1]), 1, 2**25); held += 2**25
    libc.munmap(ctypes.c_void_p(kept[-1] + 4096), ctypes.c_size_t(2**25 - 4096))
keep(held)""",
    "pages_unmapped_from_a_map_of_zeros": """
zeros = os.open('/dev/zero', os.O_RDWR)
while held <= ENOUGH:
    kept.append(libc.mmap(None, ctypes.c_size_t(2**25), 3, 1, zeros, ctypes.c_long(0)))
    if kept[-1] in (None, 2**64 - 1): break
    ctypes.memset(ctypes.c_void_p(kept[-1]), 1, 2**25); held += 2**25
    libc.munmap(ctypes.c_void_p(kept[-1] + 4096), ctypes.c_size_t(2**25 - 4096))
keep(held)""",
    "pages_that_a_shared_map_forgot": """
def hold():
    global held
    kept.append(libc.mmap(None, ctypes.c_size_t(2**24), 3, 0x21, -1, ctypes.c_long(0)))
    assert kept[-1] not in (None, 2**64 - 1)
    ctypes.memset(ctypes.c_void_p(kept[-1]), 1, 2**24); held += 2**24
    libc.madvise(ctypes.c_void_p(kept[-1]), ctypes.c_size_t(2**24), 4)
keep(in_children(hold, 20))""",
    "pages_of_a_file_in_pipes": """
with open('f', 'wb') as file: file.write(bytes(2**23))
file = os.open('f', os.O_RDWR)
def hold():
    global held
    for number in range(100):
        os.ftruncate(file, 0); os.ftruncate(file, 2**20); os.pwrite(file, bytes(2**20), 0)
        kept.append(os.pipe()); os.set_blocking(kept[-1][1], False)
        with contextlib.suppress(BlockingIOError):
            while True: held += 4096 * os.sendfile(kept[-1][1], file, held % 2**20, 1)
keep(in_children(hold, 30))""",
    "files_in_every_folder": """
for folder in ('.', '/tmp', '/dev/shm'):
    with contextlib.suppress(OSError), open(folder + '/f', 'wb', buffering=0) as file:
        while held < 2**30: held += file.write(bytes(2**20))
    if held > LIMIT: time.sleep(600)
print('held', held)""",
    "watches": """
def hold():
    global held
    ends = [os.eventfd(0) for _ in range(120)]
    for _ in range(120):
        kept.append(select.epoll())
        for end in ends: kept[-1].register(end); held += 200
keep(in_children(hold, 30))""",
    "maps": """
def hold():
    global held
    kept.append(libc.mmap(None, ctypes.c_size_t(2**25), 1, 0x22, -1, ctypes.c_long(0)))
    assert kept[-1] not in (None, 2**64 - 1)
    for offset in range(0, 2**25, 8192):
        if libc.mprotect(ctypes.c_void_p(kept[-1] + offset), ctypes.c_size_t(4096), 0): break
        held += 400
keep(in_children(hold, 30), LIMIT * 9 // 10)""",
    "watches_of_closed_descriptors": """
def hold():
    global held
    kept.append(select.epoll())
    for end in [os.eventfd(0) for _ in range(100)]:
        for number in range(120, 250):
            os.dup2(end, number); kept[-1].register(number); held += 256
keep(in_children(hold, 30))""",
    "lists_of_locks_as_text": """
import fcntl
locked = open('l', 'wb')
for start in range(10**5, 10**5 - 16_000, -2): fcntl.lockf(locked, fcntl.LOCK_EX, 1, start)
def hold():
    global held
    for _ in range(100):
        kept.append(open(f'/proc/{os.getppid()}/fdinfo/{locked.fileno()}', 'rb', buffering=0))
        kept[-1].read(1); held += 2**19
keep(in_children(hold))""",
    "record_locks": """
import fcntl
def hold():
    global held
    for number in range(20):
        kept.append(open(f'l{os.getpid()}.{number}', 'wb'))
        for start in range(10**5, 10**5 - 6000, -2): fcntl.lockf(kept[-1], fcntl.LOCK_EX, 1, start); held += 200
keep(in_children(hold, 16))""",
}


@pytest.mark.parametrize("name", HOLDERS)
async def test_memory_in_the_kernels_name_is_bounded(
    isolated: Tier, client: SandboxClient, healthy: Healthy, name: str
) -> None:
    code = PRELUDE + HOLDERS[name]
    async with client.session(limits=Limits(memory_bytes=LIMIT_BYTES, num_processes=32)) as session:
        result = await session.exec(code, timeout_s=120)
        # ended for its memory, refused by the filter or by another limit, or never in possession of much
        assert result.status in {"oom", "error", "crashed"} or "held" in result.stdout, result
    await healthy()
