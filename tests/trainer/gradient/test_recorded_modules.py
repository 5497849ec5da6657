"""Norms and sums of one packed backward against autograd trajectory by trajectory, in float64 and in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from agentrl.errors import ConfigError
from tests.trainer.trainer_builders import ARCHITECTURES, action_logprobs, architecture, uneven_episodes
from trainer.gradient import attention
from trainer.gradient.logit_rule import logit_rule
from trainer.gradient.logprobs import score
from trainer.gradient.recorded_modules import check_modules, recording, tied_weight
from trainer.gradient.recorder import Recorder
from trainer.gradient.sums import GradientSums
from trainer.gradient.tiles import Tiled, tile_mlps
from trainer.packing import action_tensors, join

COEFFICIENTS, SCORES = [1.0, -2.0, 0.5, 0.25, -1.0], [1.0, 0.3, 0.2, 0.1, 0.7]
Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def trained(model: Any) -> list[torch.Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def one_pass(model: Any, *, chunk_tokens: int | None = None) -> Sums:
    """(norm, total, scores) of the uneven episodes in one pack."""
    attention.install(model)
    pack = join([action_tensors(one, model.device) for one in uneven_episodes()])
    sums = GradientSums(trained(model), has_scores=True)
    sums.reset()
    recorder = Recorder(
        sums,
        bounds=pack.bounds,
        action_bounds=pack.action_bounds,
        has_norms=True,
        tied_weight=tied_weight(model),
        device=model.device,
    )
    with recording(model, recorder):
        logprob_N = score(model, pack, recorder, chunk_tokens=chunk_tokens).logprob_N
        ratios = [coefficient / score for coefficient, score in zip(COEFFICIENTS, SCORES, strict=True)]
        recorder.weigh(ratio_n=ratios, score_n=SCORES)
        seeds = zip(pack.per_segment(torch.ones_like(logprob_N)), recorder.weights.seed_n, strict=True)
        torch.autograd.backward(logprob_N, torch.cat([ones_N * seed for ones_N, seed in seeds]))
    scores = flat(sums.scores)
    sums.close_group(0.0)
    return recorder.norm2_n.sqrt(), flat(sums.total), scores


def single_backwards(model: Any, dtype: torch.dtype) -> Sums:
    """The same by autograd through the model's own attention and logits."""
    model = copy.deepcopy(model).to(dtype)
    gradients = torch.stack(
        [flat(torch.autograd.grad(action_logprobs(model, one).sum(), trained(model))) for one in uneven_episodes()]
    )
    weights = torch.tensor([COEFFICIENTS, SCORES], dtype=dtype) @ gradients
    return gradients.double().norm(dim=1), weights[0], weights[1]


def assert_same(ours: Sums, theirs: Sums, bound: float) -> None:
    norm, total, scores = (tensor.double() for tensor in ours)
    assert float(((norm - theirs[0]) / theirs[0]).abs().max()) < bound
    assert float((total - theirs[1]).norm() / theirs[1].norm()) < bound
    assert float((scores - theirs[2]).norm() / theirs[2].norm()) < bound


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_one_packed_backward_equals_a_loop_of_single_ones(name: str, dtype: torch.dtype) -> None:
    model = architecture(name)
    assert_same(one_pass(model), single_backwards(model, dtype), 1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 60])
def test_the_size_of_a_chunk_changes_nothing(chunk_tokens: int) -> None:
    model = architecture("Qwen3-tied")
    assert_same(one_pass(model, chunk_tokens=chunk_tokens), single_backwards(model, torch.float64), 1e-5)


def test_bfloat16_is_close_to_float32() -> None:
    """Norms within 2 %, sums within 3 % (relative L2): rounding of activations, not of the sums, which are float32."""
    model = architecture("Qwen3")
    theirs = single_backwards(copy.deepcopy(model).bfloat16(), torch.float64)
    assert_same(one_pass(model.bfloat16()), theirs, 0.03)


def _frozen_embedding(model: Any) -> None:
    model.model.embed_tokens.weight.requires_grad_(False)


def _only_one_layer(model: Any) -> None:
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)


def _only_biases(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))


@pytest.mark.parametrize("freeze", [_frozen_embedding, _only_one_layer, _only_biases])
def test_frozen_weights_have_no_share_in_norms_and_sums(freeze: Callable[[Any], None]) -> None:
    model = architecture("Qwen2")
    freeze(model)
    assert_same(one_pass(model), single_backwards(model, torch.float64), 1e-5)


def test_layer_norms_with_biases_are_exact() -> None:
    model = architecture("Qwen3")
    norm = nn.LayerNorm(32)
    with torch.no_grad():
        norm.weight.add_(torch.randn(32) * 0.1)
        norm.bias.add_(torch.randn(32) * 0.1)
    model.model.norm = norm
    assert_same(one_pass(model), single_backwards(model, torch.float64), 1e-5)


def test_checkpointed_layers_are_exact() -> None:
    from trainer.model import checkpoint_layers

    model = architecture("Qwen3-tied")
    theirs = single_backwards(model, torch.float64)
    logit_rule(model)  # a forward of its own, once
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpoint_layers(model)
    assert_same(one_pass(model), theirs, 1e-5)
    assert len(calls) == 2, "the layer was not computed again in the backward"


def test_mlps_in_tiles_are_exact_because_a_recorded_pass_computes_them_whole() -> None:
    """A tile's rows against the bounds of a pack gave gradients that were 23 % wrong."""
    model = architecture("Qwen3-tied")
    theirs = single_backwards(model, torch.float64)
    tile_mlps(model, 3)
    assert_same(one_pass(model), theirs, 1e-5)
    assert all(isinstance(layer.mlp.forward, Tiled) for layer in model.model.layers)


def test_adapters_are_exact_and_the_frozen_model_costs_nothing() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(architecture("Qwen3"), settings).eval()
    check_modules(model)
    assert_same(one_pass(model), single_backwards(model, torch.float64), 1e-5)
    assert all("lora" in name for name, parameter in model.named_parameters() if parameter.requires_grad)


def test_autograd_makes_no_gradient_and_modules_are_as_before() -> None:
    model = architecture("Llama-tied")
    one_pass(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


class Doubled(nn.Linear):
    """A linear layer that does more than multiply by its weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_an_unknown_module_with_weights_is_refused_by_class_name() -> None:
    model = architecture("Qwen3")
    check_modules(model)
    model.model.layers[0].mlp.up_proj = Doubled(32, 48, bias=False)
    with pytest.raises(ConfigError, match=r"Doubled \(model.layers.0.mlp.up_proj\)"):
        check_modules(model)
    model.model.layers[0].mlp.up_proj.requires_grad_(False)
    check_modules(model)


def test_weights_shared_by_more_than_embedding_and_head_are_refused() -> None:
    model = architecture("Qwen3")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ConfigError, match="share a weight"):
        check_modules(model)


def test_a_head_with_a_bias_is_refused() -> None:
    model = architecture("Qwen3")
    model.lm_head = nn.Linear(32, 300)
    with pytest.raises(ConfigError, match="output embedding"):
        check_modules(model)
