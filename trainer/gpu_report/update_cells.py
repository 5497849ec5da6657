"""Cells of weight updates: how long they pause generation, and what becomes of a refused and of an interrupted one."""

from __future__ import annotations

import asyncio
import copy
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from agentrl.config import Config
from agentrl.config.engine import Transfer
from agentrl.engine.base import parity as parity_of
from agentrl.engine.parity import ParityBounds, mean_bound
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.errors import AgentRLError
from agentrl.supervision.child import Child
from agentrl.types import Probe, Sampling
from trainer.gpu_report import random_models, workload
from trainer.gpu_report.cells import Claims, Measured, NotHere, Setup
from trainer.gpu_report.engine_cells import engine_config, make_model, serving
from trainer.gpu_report.publishing import Publication, Sender
from trainer.gpu_report.serving import outlasting
from trainer.weights.publisher import STREAMED
from trainer.weights.source import WeightSource

NUM_UPDATES = 3
NUM_RUNNING = 16
STEP_OF_WEIGHTS = 1.0001
ANNOUNCED_WITHIN_S, KILLED_WITHIN_S = 2.0, 20.0
RECEIVING_AFTER_S = 1.0  # by then the engine has paused and waits for the second half
KILL_AFTER_S = 0.02  # after the engine was told of the update, where the source cannot be held in its middle


def updates(setup: Setup, claims: Claims, *, mode: Transfer) -> Measured:
    """Updates of an idle and of a busy engine, one that must be refused, and one in which the engine is killed."""
    if mode == "nccl" and (number := torch.cuda.device_count()) < 2:
        raise NotHere(f"nccl needs two GPUs, one for the learner and one for the engine; there are {number}")
    config = engine_config(setup, max_context=2048, weight_transfer=mode, update_timeout_s=60)
    model = make_model(setup, setup.of_size("1.5B", "tiny"), dtype=workload.dtype_of(torch.device(setup.device)))
    return asyncio.run(_Updates(setup, claims, config, model, mode).measured())


class _Updates:
    """One engine and the publisher of one mode."""

    def __init__(self, setup: Setup, claims: Claims, config: Config, model: Any, mode: Transfer) -> None:
        self._setup, self._claims, self._config, self._model, self._mode = setup, claims, config, model, mode
        self._version = 0
        self._source = _HeldSource(model, dtype=model.dtype)

    async def measured(self) -> Measured:
        async with serving(self._setup, self._config) as (engine, part):
            sender = self._sender(self._model, self._source)
            self._source.is_sending = sender.announced
            try:
                await self._next(engine, sender)  # loads code and connects
                idle = [await self._next(engine, sender) for _ in range(NUM_UPDATES)]
                async with _running(engine):
                    busy = [await self._next(engine, sender) for _ in range(NUM_UPDATES)]
                found: Measured = {"idle": _row(idle), "busy": _row(busy), "busy_requests": NUM_RUNNING}
                if self._mode in STREAMED:
                    found["refused"] = await self._refused(engine)
                    await sender.reopen()
                found["killed"] = await self._killed(engine, sender, part)
                idle_s, busy_s = found["idle"]["gap_s"], found["busy"]["gap_s"]
                found["summary"] = (
                    f"{found['idle']['bytes'] / 1e9:.3g} GB, gap {idle_s:.3g} s idle and {busy_s:.3g} s busy; "
                    f"proven again {found['killed']['proven_again_after_s']:.0f} s after the kill"
                )
                return found
            finally:
                with suppress(AgentRLError):
                    await sender.close()

    def _sender(self, model: Any, source: WeightSource) -> Sender:
        folder = self._setup.folder / "weights"
        return Sender(model, mode=self._mode, config=self._config.engine, folder=folder, source=source)

    async def _next(self, engine: VLLMEngine, sender: Sender) -> Publication:
        """Other weights, as the next version."""
        probe = await asyncio.to_thread(_changed, self._model)
        self._version += 1
        return await sender.publish(engine, self._version, probe)

    async def _refused(self, engine: VLLMEngine) -> Measured:
        """Weights of a model with a layer less: refused by name, and the engine goes on with those it had."""
        other = _shorter(self._model)
        sender = self._sender(other, WeightSource(other, dtype=other.dtype))
        began = time.monotonic()
        try:
            await sender.publish(engine, self._version + 1, random_models.probe(other))
            said = ""
        except AgentRLError as error:
            said = str(error)
        finally:
            with suppress(AgentRLError):
                await sender.close()
        self._claims.hold(bool(said), "weights of another model were taken")
        await self._check(engine, "after a refused update")
        return {"said": said[:500], "seconds": time.monotonic() - began}

    async def _killed(self, engine: VLLMEngine, sender: Sender, part: Child) -> Measured:
        """An engine killed in mid-update returns, is sent the same version, and proves it."""
        starts, began = part.num_starts, time.monotonic()
        killing = asyncio.create_task(self._kill(sender, part))
        publication = await self._next(engine, sender)
        when = await killing
        self._claims.hold(
            part.num_starts == starts + 1, f"the engine was started {part.num_starts - starts} times more"
        )
        self._claims.hold(publication.update.parity is not None, "the update after the restart was not proven")
        await self._check(engine, "after a restart")
        return {"killed": when, "proven_again_after_s": time.monotonic() - began}

    async def _kill(self, sender: Sender, part: Child) -> str:
        """End the engine while it takes weights."""
        self._source.hold()
        await asyncio.to_thread(sender.announced.wait, KILLED_WITHIN_S)
        is_held = await asyncio.to_thread(
            self._source.wait_half, 2 * ANNOUNCED_WITHIN_S if self._mode in STREAMED else 0
        )
        await asyncio.sleep(RECEIVING_AFTER_S if is_held else KILL_AFTER_S)
        part.end_all()
        self._source.go_on()
        return "with half of the tensors sent" if is_held else f"{KILL_AFTER_S} s after it was told of the update"

    async def _check(self, engine: VLLMEngine, when: str) -> None:
        """The engine answers with the model's logprobs, as the version it should have."""
        version = await engine.version()
        self._claims.hold(version == self._version, f"{when} the engine has version {version}, not {self._version}")
        ids = random_models.probe(self._model).token_ids
        found = parity_of(await engine.score(ids), random_models.logprobs(self._model, ids))
        wrong = ParityBounds(mean_bound(self._config)).refuses(found)
        self._claims.hold(not wrong, f"{when} logprobs differ by {found.mean_abs:.2g} nats on average")


class _HeldSource(WeightSource):
    """Can be held when half of its tensors were read, once."""

    def __init__(self, model: Any, *, dtype: torch.dtype) -> None:
        super().__init__(model, dtype=dtype)
        self._is_on_hold = False
        self._half, self._going = threading.Event(), threading.Event()
        self.is_sending = threading.Event()

    def hold(self) -> None:
        """From now on wait in the middle, where it is being sent."""
        self._is_on_hold = True

    def wait_half(self, timeout_s: float) -> bool:
        """Whether it is held in its middle."""
        return self._half.wait(timeout_s)

    def go_on(self) -> None:
        """Release it."""
        self._is_on_hold = False
        self._going.set()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        half = len(self.metadata()) // 2
        for number, item in enumerate(super().__iter__()):
            # The first of its two readings makes the checksum, before the engine is told.
            if self._is_on_hold and number == half and self.is_sending.wait(ANNOUNCED_WITHIN_S):
                self._half.set()
                self._going.wait(KILLED_WITHIN_S)
            yield item


def _changed(model: Any) -> Probe:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(STEP_OF_WEIGHTS)
    return random_models.probe(model)


def _shorter(model: Any) -> Any:
    """Another model: a layer less."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers -= 1
    config.layer_types = config.layer_types[:-1]
    with torch.device(model.device):
        return type(model)(config).to(model.dtype).eval()


@asynccontextmanager
async def _running(engine: VLLMEngine) -> AsyncIterator[None]:
    """Requests that run through the whole block."""
    sampling, name = Sampling(max_tokens=1900), f"busy-{time.monotonic_ns()}"
    asked = [
        asyncio.create_task(engine.generate([5 + index] * 64, sampling, request_id=f"{name}-{index}"))
        for index in range(NUM_RUNNING)
    ]
    async with outlasting(asked):
        await asyncio.sleep(1.0)
        yield


def _row(publications: list[Publication]) -> Measured:
    gaps_s = [one.update.gap_s for one in publications]
    num_bytes = publications[0].update.num_bytes
    parities = [one.update.parity for one in publications if one.update.parity]
    return {
        "bytes": num_bytes,
        "gap_s": statistics.median(gaps_s),
        "gaps_s": gaps_s,
        "published_in_s": statistics.median(one.total_s for one in publications),
        "bytes_per_s_of_gap": num_bytes / max(1e-9, statistics.median(gaps_s)),
        "largest_parity_nats": max((one.max_abs for one in parities), default=None),
    }
