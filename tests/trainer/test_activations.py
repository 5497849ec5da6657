"""What passes keep for the backward changes their memory and no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from agentrl.config import LearnerConfig
from agentrl.errors import ConfigError
from tests.trainer.trainer_builders import architecture, config
from trainer import model as model_module
from trainer.gradient.tiles import tile_mlps
from trainer.model import keep_activations
from trainer.plan.counting import Counter

IDS = torch.arange(7)[None] * 11 % 300


def logits_and_gradients(model: Any) -> list[Tensor]:
    logits = model(input_ids=IDS, use_cache=False).logits
    parameters = list(model.parameters())
    return [logits.detach(), *torch.autograd.grad(logits.square().sum(), parameters)]


def largest_difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("num_tiles", [2, 3, 16])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_mlps_in_tiles_are_whole_mlps(num_tiles: int, is_checkpointed: bool) -> None:
    whole = logits_and_gradients(architecture("Qwen3"))
    model = architecture("Qwen3")
    settings = LearnerConfig(mlp_tiles=num_tiles, gradient_checkpointing=is_checkpointed)
    keep_activations(model, settings)
    assert largest_difference(logits_and_gradients(model), whole) < 1e-5


def test_tiles_keep_the_wide_layer_of_one_tile() -> None:
    """Whole, an MLP keeps about five of its wide layers for the backward; in eight tiles, those of an eighth."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    def peak_bytes(num_tiles: int) -> int:
        with torch.device("meta"):
            block = torch.nn.Module()
            block.mlp = Qwen3MLP(Qwen3Config(hidden_size=64, intermediate_size=640))
            outer = torch.nn.ModuleDict({"block": block})
            hidden = torch.zeros(1, 4096, 64, requires_grad=True)
        if num_tiles > 1:
            tile_mlps(outer, num_tiles)
        with Counter("meta", known=[*outer.parameters(), hidden]) as counter:
            block.mlp(hidden).sum().backward()
        return counter.peak_bytes

    wide_bytes = 4 * 4096 * 640
    assert peak_bytes(1) > 4 * wide_bytes
    assert peak_bytes(8) < 2 * wide_bytes


def test_a_model_without_such_mlps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner.mlp_tiles=4: Linear has no MLP to divide"):
        tile_mlps(torch.nn.Linear(2, 2), 4)


def test_only_the_layers_inputs_are_moved_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the move is none; the tensors that would be moved are counted and copied here."""
    moved: list[torch.Size] = []

    class Moved(saved_tensors_hooks):
        def __init__(self, *, pin_memory: bool) -> None:
            assert not pin_memory
            super().__init__(self._keep, lambda kept: kept)

        def _keep(self, one: Tensor) -> Tensor:
            moved.append(one.shape)
            return one.clone()

    monkeypatch.setattr(model_module, "save_on_cpu", Moved)
    model = architecture("Qwen3")
    whole = logits_and_gradients(architecture("Qwen3"))
    keep_activations(model, LearnerConfig(gradient_checkpointing=True, offload_activations=True))
    assert largest_difference(logits_and_gradients(model), whole) < 1e-5
    assert moved == [torch.Size([1, 7, 32])] * 2  # one for each layer


def test_a_planned_pass_counts_no_gpu_memory_for_what_is_on_the_host() -> None:
    def kept_bytes(**settings: bool) -> int:
        with torch.device("meta"):
            model = architecture("Qwen3")
        keep_activations(model, LearnerConfig(gradient_checkpointing=True, **settings))
        with Counter("meta", known=model.parameters()) as counter:
            hidden = model.model(input_ids=torch.zeros(1, 64, dtype=torch.int64, device="meta"), use_cache=False)[0]
            kept = counter.now_bytes
            hidden.sum().backward()
        return kept

    assert kept_bytes() - kept_bytes(offload_activations=True) >= 4 * 64 * 32


def test_offload_without_checkpointed_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set gradient_checkpointing=true"):
        config(tmp_path, learner={"offload_activations": True})
