"""Adapters: the exact one-pass gradient, steps that move nothing else, merged weights, exports, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_score_gradients import assert_same, one_pass, single_backwards
from trainer_builders import ARCHITECTURES, architecture

from agentrl.config import LoraConfig
from trainer import lora

SMALL = {"rank": 4, "alpha": 8}


def adapted(model: Any, **settings: Any) -> Any:
    """`model` with adapters that do add something."""
    found = lora.adapted(model, LoraConfig(**{**SMALL, **settings})).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_packed_backward_equals_a_loop_of_single_ones(name: str) -> None:
    """Norms and both sums of A and B; the frozen weights have none."""
    model = adapted(architecture(name))
    assert_same(one_pass(model), single_backwards(model, torch.float64), 1e-5)
