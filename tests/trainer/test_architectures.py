"""Architectures that only the plain method trains: log-probabilities and gradients against the model's own logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from agentrl.errors import ConfigError
from tests.trainer.trainer_builders import action_logprobs, episode
from trainer import startup_proof
from trainer.gradient import attention
from trainer.gradient.capped_attention import capped_attention
from trainer.gradient.logprobs import score
from trainer.packing import action_tensors, join
from trainer.reference import Reference

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LOCAL = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT = {
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "head_dim": 8,
}
PACKED: dict[str, dict[str, Any]] = {
    "Qwen3Moe": EXPERTS,
    "Mixtral": EXPERTS | {"sliding_window": 6},
    "GptOss": EXPERTS | LOCAL,
    "Gemma2": LOCAL | {"query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 0.5},
    "Gemma3": LOCAL | {"query_pre_attn_scalar": 16},
    "Olmo2": {},
    "Granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1},
    "Cohere2": LOCAL | {"logit_scale": 0.3},
    "DeepseekV3": EXPERTS | LATENT,
    "Phi": {},  # its head has a bias
}
ALONE: dict[str, dict[str, Any]] = {
    "Qwen3Next": EXPERTS | LINEAR,
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Llama4": EXPERTS | {"attention_chunk_size": 6},
}


def model_of(name: str, settings: dict[str, Any]) -> Any:
    """A random model of 2 layers. Every weight, scales and biases too, differs from its initial value."""
    import transformers

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}{'Text' if name in ('Gemma3', 'Llama4') else ''}Config")
    ids = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(
        config(**{"num_key_value_heads": 2, "head_dim": 16, **shape, **ids, **settings})
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("name", [*PACKED, *ALONE])
def test_packs_have_the_models_own_logprobs_and_gradients(name: str) -> None:
    """The model's own: text by text, with its plainest attention and autograd."""
    model = model_of(name, (PACKED | ALONE)[name])
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    texts = [episode(str(seed), reward=1.0, seed=seed, shape=((6, 9), (3, 4))) for seed in range(3)]
    seeds = [torch.linspace(-1, 2, 13), torch.linspace(1, -1, 13), torch.full((13,), 0.5)]
    theirs = [action_logprobs(own, text) for text in texts]
    torch.autograd.backward(theirs, seeds)
    startup_proof.prepare(model, is_recorded=False)
    assert attention.is_installed(model) == (name in PACKED)
    tensors = [action_tensors(text, model.device) for text in texts]
    packs = [tensors] if name in PACKED else [[one] for one in tensors]
    ours = torch.cat([score(model, join(pack), call=model).logprob_N for pack in packs])
    torch.testing.assert_close(ours, torch.cat(theirs), rtol=0, atol=1e-5)
    ours.backward(torch.cat(seeds))
    for (key, mine), other in zip(model.named_parameters(), own.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), key
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", ["Gemma2", "Qwen3Next"])
def test_a_frozen_model_of_another_architecture_scores_the_same_texts(name: str) -> None:
    """One that takes packs, with a soft cap, and one that reads a text at a time."""
    model = model_of(name, (PACKED | ALONE)[name])
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    texts = [episode(str(seed), reward=1.0, seed=seed, shape=((6, 9), (3, 4))) for seed in range(3)]
    startup_proof.prepare_frozen(model)
    found = Reference(model).logprobs([action_tensors(text, model.device) for text in texts])
    theirs = [action_logprobs(own, text).detach().double() for text in texts]
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-5)


def test_a_model_without_packs_is_named_in_the_log_and_refused_where_norms_are_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    startup_proof.prepare(model_of("Lfm2", ALONE["Lfm2"]), is_recorded=False)
    assert "Lfm2ForCausalLM has layers of type conv; so each episode has a forward of its own" in caplog.text
    with pytest.raises(ConfigError, match="use a preset without norms"):
        startup_proof.prepare(model_of("Qwen3Moe", EXPERTS))


def test_a_sliding_window_that_is_not_passed_on_is_refused() -> None:
    class Layer(torch.nn.Module):
        sliding_window = 4

    tensor = torch.zeros(1, 2, 8, 4)
    with pytest.raises(ConfigError, match="sliding window of which packed attention is not told"):
        attention._attend(Layer(), tensor, tensor, tensor, None)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("cap", "has_sink"), [(None, True), (0.7, False), (0.7, True)])
def test_attention_with_a_cap_or_a_sink_is_the_formulas(
    monkeypatch: pytest.MonkeyPatch, window: int | None, cap: float | None, has_sink: bool
) -> None:
    """In blocks of 4 of 11 queries, values and gradients in float64 against the dense formula."""
    monkeypatch.setattr("trainer.gradient.capped_attention.BLOCK", 4)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 11, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    sink_H = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True) if has_sink else None
    inputs = [query, key, value] + ([] if sink_H is None else [sink_H])
    ours = capped_attention(query, key, value, scaling=0.4, window=window, cap=cap, sink_H=sink_H)
    score_1HSS = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) * 0.4
    if cap is not None:
        score_1HSS = cap * torch.tanh(score_1HSS / cap)
    distance_SS = torch.arange(11)[:, None] - torch.arange(11)
    is_seen_SS = (distance_SS >= 0) & (distance_SS < (window or 11))
    weight_1HSS = score_1HSS.exp() * is_seen_SS
    total_1HS1 = weight_1HSS.sum(-1, keepdim=True)
    if sink_H is not None:
        total_1HS1 = total_1HS1 + sink_H.exp()[:, None, None]
    theirs = weight_1HSS / total_1HS1 @ value.repeat_interleave(2, dim=1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    seeds = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, seeds), torch.autograd.grad(theirs, inputs, seeds), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
