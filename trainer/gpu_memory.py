"""The learner's part of a GPU that an engine uses too: a cap on its own memory, and room for the engine's weights.

Independent of models and of how weights travel. The division itself is agentrl/engine/memory.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from agentrl.config import EngineConfig
from agentrl.engine import memory
from agentrl.errors import ConfigError, LearnerError

log = logging.getLogger(__name__)

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments:true"
LESS = (
    "lower learner.pack_tokens, or set learner.gradient_checkpointing=true, learner.offload_optimizer=true or, with "
    "exact norms, learner.gradient=two_pass"
)


class GpuShare:
    """What this process may take of its GPU. Does nothing where `is_shared` is false, or without a GPU.

    Example::

        share = GpuShare(config.engine, is_shared=True)
        with share.explained():
            share.begin_step()  # the engine sleeps, if engine.sleep_while_training is set
            ...
            share.make_room()  # before the engine takes its memory again
    """

    def __init__(self, engine: EngineConfig, *, is_shared: bool) -> None:
        """Caps the memory of the current device. Raises ConfigError where the engine leaves nothing."""
        self._engine = engine
        self._total_bytes = 0
        self._cap: float | None = None
        if is_shared and torch.cuda.is_available():
            self._total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            self._set_cap(engine_sleeps=False)

    @property
    def step_bytes(self) -> int | None:
        """What torch may take of the GPU during a step; None without a GPU."""
        if not torch.cuda.is_available():
            return None
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if self._cap is None:
            return total - memory.OUTSIDE_BYTES
        sleeps = self._engine.sleep_while_training
        return int(memory.learner_fraction(self._engine, total_bytes=total, engine_sleeps=sleeps) * total)

    def begin_step(self) -> None:
        """The engine sleeps from now on, if it does: its memory may be used."""
        if self._cap is not None and self._engine.sleep_while_training:
            self._set_cap(engine_sleeps=True)

    def make_room(self) -> None:
        """Give back what torch's allocator only caches, before the engine takes new weights.

        Raises LearnerError where an engine that slept would not find its memory.
        """
        if self._cap is None:
            return
        torch.cuda.empty_cache()
        if not self._engine.sleep_while_training:
            return
        self._set_cap(engine_sleeps=False)
        if (kept := torch.cuda.memory_reserved()) > self._cap * self._total_bytes:
            fraction = memory.engine_fraction(self._engine, is_shared=True)
            raise LearnerError(
                f"the learner keeps {kept / 1e9:.3g} GB of its GPU between steps, and beside the engine, which wakes "
                f"with engine.gpu_memory_fraction={fraction:g}, {self._cap * self._total_bytes / 1e9:.3g} GB are its: "
                "lower engine.gpu_memory_fraction, or set learner.offload_optimizer=true"
            )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn torch's error for a GPU that is full into a LearnerError that names the cap and what lowers the need."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise LearnerError(f"the learner's GPU is full: {self._reason()}. torch says: {error}") from error

    def _set_cap(self, *, engine_sleeps: bool) -> None:
        self._cap = memory.learner_fraction(self._engine, total_bytes=self._total_bytes, engine_sleeps=engine_sleeps)
        torch.cuda.set_per_process_memory_fraction(self._cap)
        log.info("torch may take %.3g of the GPU's %.3g GB", self._cap, self._total_bytes / 1e9)

    def _reason(self) -> str:
        if self._cap is None:
            return LESS
        fraction = memory.engine_fraction(self._engine, is_shared=True)
        return (
            f"it may take {self._cap * self._total_bytes / 1e9:.3g} of {self._total_bytes / 1e9:.3g} GB, since the "
            f"engine uses the same GPU (engine.gpu_memory_fraction={fraction:g}). Lower that; or {LESS}; or, with "
            "rollout.max_lag=0, set engine.sleep_while_training=true"
        )


def check_allocator(environment: Mapping[str, str]) -> None:
    """Raises ConfigError for an allocator whose memory the engine cannot open (`engine.weight_transfer=ipc`).

    torch shares expandable segments by pidfd_getfd, which needs the right to trace the other process: containers and
    Ubuntu's default refuse it (https://github.com/pytorch/pytorch/issues/165685).
    """
    for name in ALLOCATOR_VARIABLES:
        if EXPANDABLE in environment.get(name, "").replace(" ", "").lower():
            raise ConfigError(
                f"{name}={environment[name]}: the engine could not open such memory by CUDA IPC. Take "
                "expandable_segments out of it, or set engine.weight_transfer=safetensors"
            )
