"""Our gloo backend on both ends, in threads of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agentrl.engine.vllm.small_engines import (
    Engine,
    Orchestrator,
    Source,
    assert_hold,
    assert_noticed_by_all_that_one_does_not_join,
)

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

    assert_noticed_by_all_that_one_does_not_join(all_engines, sender)
    all_engines = engines(tmp_path, 1)
    sender(Orchestrator(all_engines), Source(7.0)).send_weights()
    assert_hold(all_engines[0], 7.0)
