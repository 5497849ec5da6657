"""What the service does on the host for sessions: measuring their folders, claiming uids."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from pathlib import Path

import pytest

from sandbox.backends import folders, processes
from sandbox.backends.uids import NUM_UIDS, UidRange


def test_a_folders_size_counts_every_level_and_no_target_of_a_symlink(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    (inside / "a" / "b").mkdir(parents=True)
    outside.mkdir()
    (outside / "big").write_bytes(b"x" * 10**7)
    (inside / "a" / "b" / "file").write_bytes(b"x" * 10**6)
    (inside / "link").symlink_to(outside)
    assert 10**6 <= folders.size_bytes(str(inside)) < 2 * 10**6
    assert folders.size_bytes(str(tmp_path / "absent")) == 0


def test_kills_go_on_while_a_process_takes_long_to_die_and_end_where_new_ones_keep_coming() -> None:
    ended = 2**22 + 1  # more than any process id
    slow, bomb = processes.Kills(), processes.Kills()
    assert all(slow.again([ended]) for _ in range(100))
    assert [bomb.again([ended + number]) for number in range(20)] == [True] * 19 + [False]


@pytest.mark.parametrize("kind", ["deep", "many"])
def test_a_folder_that_takes_long_to_measure_counts_as_full(tmp_path: Path, kind: str) -> None:
    if kind == "deep":
        tmp_path.joinpath(*["d"] * (folders.MAX_DEPTH + 1)).mkdir(parents=True)
    else:
        for number in range(folders.MAX_ENTRIES + 1):
            os.close(os.open(tmp_path / str(number), os.O_CREAT | os.O_WRONLY))
    assert math.isinf(folders.size_bytes(str(tmp_path)))


def test_a_folder_exchanged_for_a_symlink_does_not_lead_outside(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    for folder in (outside, inside / "d"):
        folder.mkdir(parents=True)
    (outside / "big").write_bytes(b"x" * 10**7)
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            (inside / "d").rename(inside / "e")
            (inside / "d").symlink_to(outside)
            (inside / "d").unlink()
            (inside / "e").rename(inside / "d")

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        sizes = [folders.size_bytes(str(inside)) for _ in range(2000)]
    finally:
        stop.set()
        thread.join()
    assert not any(10**7 <= size < math.inf for size in sizes)


def test_deleted_files_that_are_mapped_count_once_and_only_below_the_folder(tmp_path: Path) -> None:
    def deleted_bytes(folder: Path) -> int:
        return processes.deleted_bytes([os.getpid()], str(folder))

    before = deleted_bytes(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10**6)
    with path.open("rb") as file:
        address = _map(file.fileno(), 10**6)
        path.unlink()
        assert 10**6 <= deleted_bytes(tmp_path) - before < 2 * 10**6
    try:
        assert deleted_bytes(tmp_path) - before >= 10**6
        assert deleted_bytes(tmp_path / "other") - before < 10**6
    finally:
        ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(10**6))


def _map(fd: int, num_bytes: int) -> int:
    """Map a file without Python's copy of the descriptor."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(num_bytes), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    return int(address)


def test_two_services_have_different_uids() -> None:
    with UidRange.claim() as first, UidRange.claim() as second:
        assert abs(first.first - second.first) >= NUM_UIDS
        assert max(first.first, second.first) + NUM_UIDS <= 2**31
