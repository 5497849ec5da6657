"""What is proven of a model at start, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from trainer_builders import ARCHITECTURES, architecture

from agentrl.errors import ConfigError
from trainer import self_test
from trainer.attention import NAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_known_architectures_pass_and_attend_within_segments_afterwards(name: str, dtype: torch.dtype) -> None:
    model = architecture(name).to(dtype)
    self_test.prepare(model)
    assert model.config._attn_implementation == NAME


def test_logits_that_are_changed_after_the_head_are_refused_by_name() -> None:
    model = architecture("Qwen3")
    whole = model.forward

    def softcapped(**inputs: Any) -> Any:
        output = whole(**inputs)
        output.logits = 2 * torch.tanh(output.logits / 2)
        return output

    model.forward = softcapped
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM: log-probabilities"):
        self_test.prepare(model)


class TwiceUsed(nn.Module):
    """A weight that acts twice on every token: neither pieces nor their norms add up."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(input) - self.inner(0.5 * input)
        return output


def test_a_weight_that_acts_twice_is_refused_by_its_gradients() -> None:
    model = architecture("Qwen3")
    model.model.layers[0].mlp.up_proj = TwiceUsed(model.model.layers[0].mlp.up_proj)
    with pytest.raises(ConfigError, match="gradients by trajectory"):
        self_test.prepare(model)


def test_attention_across_segments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer import attention

    monkeypatch.setattr(attention, "segment_arguments", lambda bounds, device: {})
    with pytest.raises(ConfigError, match="packed episodes"):
        self_test.prepare(architecture("Llama"))
