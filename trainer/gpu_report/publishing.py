"""The learner's own publisher, driven from a measurement: weights go to an engine as they do in a run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentrl.config import EngineConfig
from agentrl.config.engine import Transfer
from agentrl.engine import vllm_command
from agentrl.engine.base import Receivers, WeightUpdate
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.errors import WeightsWanted
from agentrl.types import Probe, TransferInit, WeightsRef
from trainer.weights.publisher import TransferSettings
from trainer.weights.source import WeightSource
from trainer.weights.transfer import publisher

T = TypeVar("T")

DEADLINE_S = 240.0
MAX_ATTEMPTS = 3


def modes(config: EngineConfig) -> tuple[Transfer, ...]:
    """Every way for weights to travel on this device."""
    if vllm_command.device_of(config) == "cuda":
        return ("safetensors", "reload", "nccl", "ipc")
    return ("safetensors", "reload", "gloo")


@dataclass(frozen=True, kw_only=True)
class Publication:
    """One version brought to an engine."""

    total_s: float  # from the learner's call until the engine has proven it
    update: WeightUpdate


class _Link:
    """What the publisher takes for the orchestrator: passes its calls on to one client, from the publisher's thread."""

    engine: VLLMEngine
    update: WeightUpdate

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.announced = threading.Event()

    def receivers(self, policy_version: int) -> Receivers:
        """The engine."""
        return self._wait(self.engine.receivers(policy_version))

    def open_transfer(self, init: TransferInit) -> None:
        """Returns once the engine has joined."""
        self._wait(self.engine.init_transfer(init))

    def publish(self, ref: WeightsRef) -> None:
        """Returns once the engine holds the weights and has proven it."""
        self.announced.set()
        self.update = self._wait(self.engine.update_weights(ref))

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(DEADLINE_S)


class Sender:
    """The publisher of one mode for `model`."""

    def __init__(
        self, model: Any, *, mode: Transfer, config: EngineConfig, folder: Path, source: WeightSource | None = None
    ) -> None:
        self._link = _Link()
        self.announced = self._link.announced
        """Set while an engine takes weights: it was told of them, or is told in this moment."""
        self._publisher = publisher(
            TransferSettings(backend=mode, rank=0, weights_dir=folder, timeout_s=DEADLINE_S),
            config.model_copy(update={"weight_transfer": mode}),
            source=source or WeightSource(model, dtype=model.dtype),
            link=self._link,
        )

    async def publish(self, engine: VLLMEngine, policy_version: int, probe: Probe) -> Publication:
        """Give `engine` the model's present weights as `policy_version`, again where it was restarted meanwhile.

        Raises LearnerError, WeightSyncError.
        """
        self._link.engine = engine
        began = time.perf_counter()
        for attempt in range(MAX_ATTEMPTS):
            self.announced.clear()
            try:
                await asyncio.to_thread(self._publisher.publish, policy_version=policy_version, probe=probe)
                await asyncio.to_thread(self._publisher.proven)
                break
            except WeightsWanted:  # as trainer/loop.py does
                if attempt == MAX_ATTEMPTS - 1:
                    raise
                await asyncio.to_thread(self._publisher.reopen)
        return Publication(total_s=time.perf_counter() - began, update=self._link.update)

    async def reopen(self) -> None:
        """Make a new group at the next publication: the engine has joined another sender's meanwhile."""
        await asyncio.to_thread(self._publisher.reopen)

    async def close(self) -> None:
        """Leave the group, where there is one."""
        await asyncio.to_thread(self._publisher.close)
