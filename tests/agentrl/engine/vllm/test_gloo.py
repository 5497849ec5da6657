"""Our gloo backend on both ends, in threads of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.vllm.gloo_group import GroupError
from tests.agentrl.engine.vllm.small_engines import Engine, Orchestrator, Source, assert_hold

pytestmark = pytest.mark.timeout(120)


def engines(tmp_path: Path, *tensor_parallel: int) -> list[Engine]:
    from agentrl.engine.vllm.gloo import GlooEngine

    return [Engine(GlooEngine, tmp_path, tensor_parallel=size) for size in tensor_parallel]


def sender(orchestrator: Orchestrator, source: Any, *, timeout_s: float = 60.0) -> Any:
    from trainer.weights.gloo import GlooTrainerEngine, GlooTrainerInitInfo

    world_size = 1 + sum(len(engine.workers) for engine in orchestrator.engines)
    info = GlooTrainerInitInfo(master_address="127.0.0.1", world_size=world_size, timeout_s=timeout_s, rank=0)
    return GlooTrainerEngine.trainer_init(info, client=orchestrator, source=source)


def test_all_workers_of_all_engines_take_weights_in_one_group(tmp_path: Path) -> None:
    all_engines = engines(tmp_path, 1, 2)
    source = Source(1.0)
    ours = sender(Orchestrator(all_engines), source)
    for source.value in (1.0, 2.0):
        ours.send_weights()
        for engine in all_engines:
            assert_hold(engine, source.value)
    ours.shutdown()


def test_an_engine_that_does_not_join_is_noticed_at_once_by_all(tmp_path: Path) -> None:
    all_engines = engines(tmp_path, 1, 1)

    def refuses(init_info: dict[str, Any]) -> None:
        raise ConnectionError("nothing listens there")

    all_engines[1].init = refuses  # type: ignore[method-assign]
    orchestrator = Orchestrator(all_engines)
    with pytest.raises(ConnectionError, match="nothing listens"):
        sender(orchestrator, Source(1.0), timeout_s=600.0)
    assert isinstance(orchestrator.settled()[0], GroupError)
    all_engines = engines(tmp_path, 1)
    sender(Orchestrator(all_engines), Source(7.0)).send_weights()
    assert_hold(all_engines[0], 7.0)
