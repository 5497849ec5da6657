"""Our publisher with vLLM's NCCL code on both ends and no GPU: a group is kept, made anew, and left by an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import EngineConfig
from agentrl.engine.base import Receivers
from agentrl.engine.checksum import checksum_of
from agentrl.errors import WeightsWanted
from agentrl.types import Probe, TransferInit, WeightsRef
from tests import fake_nccl
from tests.agentrl.engine.vllm.small_engines import Engine, Orchestrator, SmallModel
from trainer.weights.publisher import Publisher, TransferSettings
from trainer.weights.source import WeightSource
from trainer.weights.transfer import publisher

pytestmark = pytest.mark.timeout(120)
PROBE = Probe(token_ids=(), logprobs=())


@pytest.fixture(autouse=True)
def pretended() -> Iterator[None]:
    with fake_nccl.installed():
        yield


class Link:
    """The orchestrator: all engines in `running` take the weights, and each is called by its number and `exits`."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self.running = list(range(len(engines)))
        self.exits = [0] * len(engines)
        self.groups: list[int] = []
        self.refs: list[WeightsRef] = []

    def receivers(self, policy_version: int) -> Receivers:
        self.group = Orchestrator([self.engines[i] for i in self.running])
        return Receivers(engines=tuple(f"{i}#{self.exits[i]}" for i in self.running))

    def open_transfer(self, init: TransferInit) -> None:
        self.groups.append(init.init_info["world_size"])
        self.group.init_weight_transfer_engine(init.init_info)

    def publish(self, ref: WeightsRef) -> None:
        self.refs.append(ref)
        if self.group.engines:
            try:
                self.group.update_weights(ref.update_info)
            except Exception as error:
                raise WeightsWanted(str(error)) from error


def published(link: Link, model: SmallModel) -> Publisher:
    settings = TransferSettings(backend="nccl", rank=0, weights_dir=Path("/nowhere"), timeout_s=60.0)
    source = WeightSource(model, dtype=torch.float32)
    return publisher(settings, EngineConfig(update_timeout_s=30), source=source, link=link)


@pytest.fixture
def model() -> SmallModel:
    return SmallModel()


@pytest.fixture
def link(tmp_path: Path) -> Link:
    from agentrl.engine.vllm.device import NCCLEngine

    return Link([Engine(NCCLEngine, tmp_path) for _ in range(3)])


def changed(model: SmallModel) -> set[str]:
    """New weights; their checksum."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return {checksum_of(model.named_parameters())}


def test_a_group_stays_until_an_engine_leaves_or_returns(link: Link, model: SmallModel) -> None:
    sender = published(link, model)
    for version in (1, 2):
        now = changed(model)
        sender.publish(policy_version=version, probe=PROBE)
    assert link.groups == [4] and all(engine.checksums == now for engine in link.engines)

    link.running = [0, 2]
    now = changed(model)
    sender.publish(policy_version=3, probe=PROBE)
    assert link.groups == [4, 3]
    assert [engine.checksums == now for engine in link.engines] == [True, False, True]

    link.running = [1]  # it is back, and the others have version 3
    link.exits[1] += 1
    sender.publish(policy_version=3, probe=PROBE)
    assert link.groups == [4, 3, 2] and link.engines[1].checksums == now

    link.running = []
    sender.publish(policy_version=3, probe=PROBE)
    assert link.groups == [4, 3, 2] and link.refs[-1].checksum in now  # told, not sent
    sender.close()


def test_an_engine_that_dies_in_mid_broadcast_costs_one_publication(link: Link, model: SmallModel) -> None:
    sender = published(link, model)
    changed(model)
    sender.publish(policy_version=1, probe=PROBE)
    group: Any = link.engines[1].workers[0].model_update_group

    def dies(tensor: Any, src: int, stream: Any = None) -> None:
        group.destroy()
        raise ConnectionError("the engine is dead")

    group.broadcast = dies
    now = changed(model)
    with pytest.raises(WeightsWanted, match="the engine is dead"):
        sender.publish(policy_version=2, probe=PROBE)
    link.group.settled()
    for engine in (link.engines[0], link.engines[2]):  # either all of the one broadcast had arrived, or nothing counts
        assert engine.checksums in (now, {""})
    sender.reopen()
    link.running = [0, 2]
    sender.publish(policy_version=2, probe=PROBE)
    assert link.groups == [4, 3]
    assert [engine.checksums == now for engine in link.engines] == [True, False, True]
    sender.close()
