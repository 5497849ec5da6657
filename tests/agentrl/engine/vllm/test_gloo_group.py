"""The group between two real processes: bytes arrive whole whatever their dtype, and every wait ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.engine.vllm.gloo_group import SENDER, Deadline, Group, GroupError, listen, meet, own_address

HOST = "127.0.0.1"
TENSORS = [
    torch.linspace(-1, 1, 12).view(3, 4),
    torch.linspace(-1, 1, 8).view(2, 2, 2).to(torch.bfloat16),
    torch.tensor(7),
    torch.zeros(0, 5),
    torch.tensor([True, False]),
    torch.arange(3_000_000, dtype=torch.float64),
]


def opened(store: Any, rank: int) -> Group:
    return Group(store, rank=rank, world_size=2, address=HOST, timeout_s=60)


def receive_all(group: Group, answers: Any) -> None:
    for sent in TENSORS:
        received = torch.empty_like(sent)
        group.broadcast(received, Deadline(10))
        answers.put(torch.equal(received, sent) and received.dtype == sent.dtype)


def receive_nothing(group: Group, answers: Any) -> None:
    answers.put("here")
    time.sleep(60)


def receive_until_it_fails(group: Group, answers: Any) -> None:
    answers.put("here")
    started_s = time.monotonic()
    try:
        group.broadcast(torch.empty(1000), Deadline(2))
    except GroupError as error:
        answers.put((time.monotonic() - started_s, str(error)))


def receiver(port: int, action: Callable[[Group, Any], None], answers: Any) -> None:
    action(opened(meet(HOST, port, world_size=2, timeout_s=60), 1), answers)


@contextmanager
def pair(action: Callable[[Group, Any], None]) -> Iterator[tuple[Group, Any, Any]]:
    """The sender's group, what the receiver answers, and its process."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    store = listen(HOST, 0, world_size=2, timeout_s=60)
    process = context.Process(target=receiver, args=(store.port, action, answers))
    process.start()
    try:
        yield opened(store, SENDER), answers, process
    finally:
        process.kill()
        process.join(10)


def large() -> Tensor:
    """More than the connection's own buffers hold."""
    return torch.zeros(64 * 2**20, dtype=torch.uint8)


def test_tensors_of_every_kind_arrive() -> None:
    with pair(receive_all) as (group, answers, _):
        for tensor in TENSORS:
            group.broadcast(tensor, Deadline(10))
        assert [answers.get(timeout=10) for _ in TENSORS] == [True] * len(TENSORS)
        group.close()


def test_a_receiver_that_died_is_noticed_at_once() -> None:
    with pair(receive_nothing) as (group, answers, process):
        answers.get(timeout=60)
        Timer(0.5, os.kill, (process.pid, signal.SIGKILL)).start()
        started_s = time.monotonic()
        with pytest.raises(GroupError, match="gone"):
            group.broadcast(large(), Deadline(30))
        assert time.monotonic() - started_s < 10


def test_a_receiver_that_hangs_meets_the_deadline() -> None:
    with pair(receive_nothing) as (group, answers, _):
        answers.get(timeout=60)
        started_s = time.monotonic()
        with pytest.raises(GroupError):
            group.broadcast(large(), Deadline(1))
        assert 0.9 < time.monotonic() - started_s < 10
        with pytest.raises(GroupError):
            group.broadcast(torch.zeros(1), Deadline(1))


@pytest.mark.parametrize(("is_closed", "at_most_s"), [(True, 1.5), (False, 6)])
def test_a_receiver_waits_no_longer_than_its_deadline(is_closed: bool, at_most_s: float) -> None:
    with pair(receive_until_it_fails) as (group, answers, _):
        assert answers.get(timeout=60) == "here"
        if is_closed:
            group.close()
        took_s, reason = answers.get(timeout=20)
        assert took_s < at_most_s and "the other side is gone, or too slow" in reason


def test_a_deadline_that_passed_is_told() -> None:
    deadline = Deadline(0.01)
    time.sleep(0.02)
    with pytest.raises(GroupError, match=r"within 0\.01 s"):
        deadline.left()


def test_nobody_to_meet_is_told() -> None:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        with pytest.raises(GroupError, match="cannot be reached"):
            meet(HOST, sock.getsockname()[1], world_size=2, timeout_s=1)


def test_nobody_joining_is_told() -> None:
    store = listen(HOST, 0, world_size=2, timeout_s=1)
    with pytest.raises(GroupError, match="not all 2 processes joined"):
        Group(store, rank=SENDER, world_size=2, address=HOST, timeout_s=1)


def test_the_meeting_point_listens_on_its_address_alone() -> None:
    store = listen(HOST, 0, world_size=2, timeout_s=5)
    with socket.socket() as sock:
        sock.bind(("127.0.0.2", store.port))  # free elsewhere


def test_the_way_to_this_machine_starts_at_this_machine() -> None:
    assert own_address(HOST) == own_address("localhost") == HOST
