"""vLLM's CUDA IPC backend on both ends, with our mixin, over shared host memory. Handles travel as in HTTP requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import fake_ipc
from tests.agentrl.engine.vllm.small_engines import Engine, Orchestrator, Source, assert_hold
from trainer.weights.streamed import json_safe


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with fake_ipc.installed():
        yield


class OverHttp(Orchestrator):
    """Sends what the orchestrator sends: JSON."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        super().update_weights(json.loads(json.dumps(json_safe(update_info))))


def engine(tmp_path: Path, tensor_parallel: int = 1) -> Engine:
    from agentrl.engine.vllm.device import IPCEngine

    return Engine(IPCEngine, tmp_path, tensor_parallel=tensor_parallel)


def sender(orchestrator: Orchestrator, source: Any) -> Any:
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    return IPCTrainerWeightTransferEngine.trainer_init(IPCTrainerInitInfo(rank=0), client=orchestrator, source=source)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_engine_takes_the_senders_memory(tmp_path: Path, tensor_parallel: int) -> None:
    one, source = engine(tmp_path, tensor_parallel), Source(1.0)
    ours = sender(OverHttp([one]), source)
    for value in (1.0, 2.0):
        source.value = value
        ours.send_weights()
        assert_hold(one, value)


def test_a_refused_update_moves_no_layer(tmp_path: Path) -> None:
    one = engine(tmp_path)
    ours = sender(OverHttp([one]), Source(1.0))
    ours.send_weights()
    ours.source = Source(9.0, nn.ModuleDict({"embed": nn.Linear(16, 64, bias=False)}))
    with pytest.raises(ValueError, match=r"lacks 4 of 1 tensors.*layers\.0"):
        ours.send_weights()
    assert_hold(one, 1.0)
    ours.source = Source(3.0)
    ours.send_weights()
    assert_hold(one, 3.0)


def test_an_update_that_breaks_off_leaves_no_checksum_and_a_complete_one_repairs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(tmp_path)
    ours = sender(OverHttp([one]), Source(1.0))
    ours.send_weights()
    model = one.workers[0].model
    loaded, load = [], model.load_weights

    def breaks(weights: Any) -> None:
        for pair in weights:
            if len(loaded) == 2:
                raise ConnectionError("the sender's memory is gone")
            loaded.append(load([pair]))

    monkeypatch.setattr(model, "load_weights", breaks)
    ours.source = Source(5.0)
    with pytest.raises(ConnectionError, match="memory is gone"):
        ours.send_weights()
    assert one.checksums == {""} and not one.is_whole
    monkeypatch.setattr(model, "load_weights", load)
    ours.source = Source(7.0)
    ours.send_weights()
    assert_hold(one, 7.0)


def test_handles_of_another_gpu_are_refused(tmp_path: Path) -> None:
    one = engine(tmp_path)
    ours = sender(OverHttp([one]), Source(1.0))
    ours.gpu_uuid = "GPU-elsewhere"
    with pytest.raises(ValueError, match="IPC handle not found for GPU UUID"):
        ours.send_weights()
    assert one.checksums == {""}


def test_the_handles_are_of_the_senders_own_memory() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    rebuild, arguments = fake_ipc.reduce_tensor(tensor)
    theirs = rebuild(*arguments)
    tensor[0, 0] = 7.0
    assert float(theirs[0, 0]) == 7.0
