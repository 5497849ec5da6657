"""Fixtures of the learner's tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests import device


@pytest.fixture(scope="session", autouse=True)
def one_rank() -> None:
    """Do what the entry point does in a process without a launcher."""
    import torch

    from trainer import ranks

    torch.set_num_threads(1)
    ranks.set_defaults(os.environ)
    if device.HAS_GPU:  # the runs that other tests start use it
        os.environ.pop("DS_ACCELERATOR", None)


@pytest.fixture
def tiny_model(tiny_model_dir: Path) -> Any:
    """A fresh float32 copy of the tiny policy."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype="float32").eval()
