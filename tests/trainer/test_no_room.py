"""A full disk: the learner keeps what was there and names what it could not write."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.errors import LearnerError
from agentrl.types import Probe, WeightsRef
from tests.agentrl.training.troubles import Trouble
from tests.trainer.trainer_builders import config
from trainer import checkpoint
from trainer.learner import Learner
from trainer.weights.publisher import TransferSettings
from trainer.weights.source import WeightSource
from trainer.weights.transfer import FolderPublisher

NO_CHECKPOINT = Trouble("LearnerError: writing the checkpoint ...: ...")
NO_WEIGHTS = Trouble("LearnerError: writing weights of version ... to ...: ...")
MANY_BYTES = 10_000  # less than the size of the model


@contextmanager
def no_room() -> Iterator[None]:
    """No file may grow beyond MANY_BYTES: the system refuses as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MANY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def learner(tiny_model_dir: Path) -> Learner:
    return Learner(config(tiny_model_dir))


def said(error: LearnerError) -> str:
    """The error as the process writes it."""
    return f"{type(error).__name__}: {error}"


def test_a_checkpoint_without_room_leaves_the_one_before(learner: Learner, tmp_path: Path) -> None:
    before = checkpoint.save(learner, tmp_path, keep=2)
    learner.policy_version += 1
    with no_room(), pytest.raises(LearnerError) as found:
        checkpoint.save(learner, tmp_path, keep=2)
    assert NO_CHECKPOINT.is_in(said(found.value))
    assert checkpoint.newest(tmp_path) == before


class Nobody:
    """An orchestrator to which nothing may be published."""

    def publish(self, ref: WeightsRef) -> None:
        raise AssertionError("weights that were not written must not be announced")

    receivers: Any = None
    open_transfer: Any = None


def test_weights_without_room_are_told_to_nobody(learner: Learner, tmp_path: Path) -> None:
    transfer = TransferSettings(backend="safetensors", rank=0, weights_dir=tmp_path, timeout_s=1.0)
    publisher = FolderPublisher(transfer, source=WeightSource(learner.model, dtype=torch.float32), link=Nobody())
    with no_room(), pytest.raises(LearnerError) as found:
        publisher.publish(policy_version=1, probe=Probe(token_ids=(1, 2), logprobs=(-1.0,)))
    assert NO_WEIGHTS.is_in(said(found.value))
