"""vLLM's NCCL backend on both ends, with our mixin and our sender, over a communicator that needs no GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from agentrl.engine.vllm.gloo_group import GroupError
from agentrl.supervision.serving import free_port
from tests import fake_nccl
from tests.agentrl.engine.vllm.small_engines import (
    Engine,
    Orchestrator,
    Source,
    assert_hold,
    assert_noticed_by_all_that_one_does_not_join,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def pretended() -> Iterator[None]:
    with fake_nccl.installed():
        yield


def engines(tmp_path: Path, *tensor_parallel: int) -> list[Engine]:
    from agentrl.engine.vllm.device import NCCLEngine

    return [Engine(NCCLEngine, tmp_path, tensor_parallel=size) for size in tensor_parallel]


def sender(
    orchestrator: Orchestrator, source: Any, *, timeout_s: float = 30.0, buffer_bytes: int = 20_000, packed: bool = True
) -> Any:
    from trainer.weights.nccl import NCCLTrainerEngine, SenderInfo

    world_size = 1 + sum(len(engine.workers) for engine in orchestrator.engines)
    info = SenderInfo("127.0.0.1", free_port(), world_size, packed, buffer_bytes, rank=0, timeout_s=timeout_s)
    return NCCLTrainerEngine.trainer_init(info, client=orchestrator, source=source)


@pytest.mark.parametrize("sizes", [(1,), (1, 1), (1, 1, 1, 1), (2, 2)], ids=["1", "2", "4", "2 of TP 2"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one by one"])
def test_all_engines_take_weights_through_one_communicator(
    tmp_path: Path, sizes: tuple[int, ...], packed: bool
) -> None:
    all_engines = engines(tmp_path, *sizes)
    source = Source(1.0)
    ours = sender(Orchestrator(all_engines), source, packed=packed)
    for value in (1.0, 2.0):
        source.value = value
        ours.send_weights()
        for engine in all_engines:
            assert_hold(engine, value)
    ranks = sorted(worker.model_update_group.rank for engine in all_engines for worker in engine.workers)
    assert ranks == list(range(1, 1 + sum(sizes)))
    ours.shutdown()


def test_a_refused_update_moves_no_layer_and_the_next_one_arrives(tmp_path: Path) -> None:
    all_engines = engines(tmp_path, 1, 1)
    source = Source(1.0)
    ours = sender(Orchestrator(all_engines), source)
    ours.send_weights()
    sums = all_engines[0].checksums
    foreign = nn.ModuleDict({"embed": nn.Linear(16, 64, bias=False)})
    ours.source = Source(9.0, foreign)
    with pytest.raises(ValueError, match=r"lacks 4 of 1 tensors.*layers\.0"):
        ours.send_weights()
    for engine in all_engines:
        assert engine.is_whole and engine.checksums == sums
        assert_hold(engine, 1.0)
    with pytest.raises(RuntimeError, match="connect again"):
        ours.send_weights()
    sender(Orchestrator(all_engines), Source(2.0)).send_weights()
    for engine in all_engines:
        assert_hold(engine, 2.0)


class Breaking(Source):
    """Calls `act` before its third tensor is sent."""

    def __init__(self, value: float, act: Any) -> None:
        super().__init__(value)
        self._act = act

    def __iter__(self) -> Any:
        for at, pair in enumerate(super().__iter__()):
            if at == 3:
                self._act()
            yield pair


def fails() -> None:
    raise ConnectionError("gathering failed")


def test_a_broken_update_leaves_no_checksum_and_a_complete_one_repairs_it(tmp_path: Path) -> None:
    all_engines = engines(tmp_path, 1, 2)
    orchestrator = Orchestrator(all_engines)
    ours = sender(orchestrator, Source(1.0))
    ours.send_weights()
    ours.source = Breaking(5.0, fails)
    with pytest.raises(ConnectionError, match="gathering failed"):
        ours.send_weights()
    assert all(isinstance(error, GroupError) for error in orchestrator.settled())
    for engine in all_engines:
        assert engine.checksums == {""}  # although an aborted communicator let every layer load something
    sender(Orchestrator(all_engines), Source(7.0)).send_weights()
    for engine in all_engines:
        assert_hold(engine, 7.0)


def test_a_sender_that_hangs_meets_the_deadline_of_the_engines(tmp_path: Path) -> None:
    all_engines = engines(tmp_path, 1)
    orchestrator = Orchestrator(all_engines)
    ours = sender(orchestrator, Breaking(1.0, (hang := threading.Event()).wait), timeout_s=1.0)
    with pytest.raises(GroupError, match="not transferred within 1 s"), ThreadPoolExecutor(1) as threads:
        sending = threads.submit(ours.send_weights)
        orchestrator_error = first_error(orchestrator)
        hang.set()
        assert isinstance(orchestrator_error, GroupError)
        sending.result()
    assert all_engines[0].checksums == {""}


def first_error(orchestrator: Orchestrator) -> BaseException | None:
    """Of the update that has begun or is about to."""
    while not orchestrator.is_updating:
        threading.Event().wait(0.01)
    return orchestrator.settled()[0]


def test_an_engine_that_dies_in_mid_broadcast_costs_neither_the_sender_nor_the_others(tmp_path: Path) -> None:
    all_engines = engines(tmp_path, 1, 1, 1)
    orchestrator = Orchestrator(all_engines)
    ours = sender(orchestrator, Source(5.0), timeout_s=60.0)
    worker = all_engines[1].workers[0]
    group, receive = worker.model_update_group, worker.model_update_group.broadcast

    def last(tensor: Any, src: int, stream: Any = None) -> None:
        receive(tensor, src)
        group.destroy()
        raise ConnectionError("the engine is dead")

    group.broadcast = last
    with pytest.raises(ConnectionError, match="the engine is dead"):
        ours.send_weights()
    errors = orchestrator.settled()
    assert not all_engines[1].is_whole
    others = [all_engines[0], all_engines[2]]
    assert isinstance(errors[0], GroupError) and isinstance(errors[2], GroupError)
    assert all(engine.checksums == {""} for engine in others)
    sender(Orchestrator(others), Source(7.0)).send_weights()
    for engine in others:
        assert_hold(engine, 7.0)


def test_an_engine_that_does_not_join_is_noticed_at_once_by_all(tmp_path: Path) -> None:
    all_engines = engines(tmp_path, 1, 1)

    assert_noticed_by_all_that_one_does_not_join(all_engines, sender)
    assert all_engines[0].workers[0].model_update_group is None


def test_an_engine_that_dies_while_nccl_joins_is_noticed_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    all_engines = engines(tmp_path, 1, 1)
    join = NCCLWeightTransferEngine.init_transfer_engine

    def joins_or_dies(worker: Any, init_info: Any) -> None:
        if init_info.rank_offset == 2:
            raise ConnectionError("the engine is dead")
        join(worker, init_info)

    monkeypatch.setattr(NCCLWeightTransferEngine, "init_transfer_engine", joins_or_dies)
    orchestrator = Orchestrator(all_engines)

    def send() -> None:  # whoever calls it leaves it alone after the refusal: NCCL still waits for the engine
        sender(orchestrator, Source(1.0), timeout_s=600.0)

    threading.Thread(target=send, daemon=True).start()
    while not orchestrator.calls:
        threading.Event().wait(0.01)
    other, dead = orchestrator.settled()
    assert isinstance(dead, ConnectionError) and isinstance(other, GroupError)
    assert all_engines[0].workers[0].model_update_group is None


def test_an_engine_that_never_joins_meets_the_deadline(tmp_path: Path) -> None:
    all_engines = engines(tmp_path, 1, 1)
    all_engines[1].init = lambda init_info: None  # type: ignore[method-assign]
    with pytest.raises(GroupError, match="1 of 2 workers joined within 1 s"):
        sender(Orchestrator(all_engines), Source(1.0), timeout_s=1.0)
