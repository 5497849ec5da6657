"""What the start-up proof accepts and refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from agentrl.config import LoraConfig
from agentrl.errors import ConfigError
from tests.trainer.trainer_builders import ARCHITECTURES, action_logprobs, architecture, episode
from trainer import lora, startup_proof
from trainer.gradient.attention import NAME
from trainer.gradient.logprobs import score
from trainer.packing import action_tensors, join


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_known_architectures_pass_and_attend_within_segments_afterwards(name: str, dtype: torch.dtype) -> None:
    model = architecture(name).to(dtype)
    startup_proof.prepare(model)
    assert model.config._attn_implementation == NAME


def changing_its_logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    model = architecture("Qwen3")
    whole = model.forward

    def changed(**inputs: Any) -> Any:
        output = whole(**inputs)
        output.logits = change(output.logits)
        return output

    model.forward = changed
    return model


@pytest.mark.parametrize("change", [lambda x: x / 7, lambda x: 2 * torch.tanh(x / 2)], ids=["factor", "soft cap"])
def test_a_factor_and_a_soft_cap_of_the_logits_are_followed(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    startup_proof.prepare(changing_its_logits(change))


@pytest.mark.parametrize("change", [torch.sinh, lambda x: x + 1], ids=["other curve", "constant"])
def test_logits_that_are_otherwise_changed_are_refused_by_name(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM changes its logits after the output head"):
        startup_proof.prepare(changing_its_logits(change))


class TwiceUsed(nn.Module):
    """A weight that acts twice on every token, so that its pieces and norms are wrong."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(input) - self.inner(0.5 * input)
        return output


@pytest.mark.parametrize("part_elements", [startup_proof.PART_ELEMENTS, 5000], ids=["at once", "in parts"])
def test_a_weight_that_acts_twice_is_refused_by_its_gradients(
    monkeypatch: pytest.MonkeyPatch, part_elements: int
) -> None:
    monkeypatch.setattr(startup_proof, "PART_ELEMENTS", part_elements)
    model = architecture("Qwen3")
    model.model.layers[0].mlp.up_proj = TwiceUsed(model.model.layers[0].mlp.up_proj)
    with pytest.raises(ConfigError, match="gradients by trajectory"):
        startup_proof.prepare(model)


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("name", ["Qwen3", "Qwen2-tied"])
def test_weights_are_proven_some_at_a_time(monkeypatch: pytest.MonkeyPatch, name: str, is_recorded: bool) -> None:
    monkeypatch.setattr(startup_proof, "PART_ELEMENTS", 5000)  # the embedding alone is larger
    model = architecture(name)
    startup_proof.prepare(model, is_recorded=is_recorded)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def fresh_adapters() -> Any:
    return lora.with_adapters(architecture("Qwen3"), LoraConfig(rank=4, alpha=8, target_modules="all-linear")).eval()


def test_a_fresh_adapter_whose_first_half_acts_twice_is_refused() -> None:
    model = fresh_adapters()
    adapter = model.get_base_model().model.layers[0].mlp.up_proj.lora_A
    adapter["default"] = TwiceUsed(adapter["default"])
    with pytest.raises(ConfigError, match="gradients by trajectory"):
        startup_proof.prepare(model)
    assert not any(bool(p.any()) for name, p in model.named_parameters() if "lora_B" in name)


def test_adapters_are_to_the_bit_what_they_were() -> None:
    model = fresh_adapters()
    model.get_base_model().model.layers[1].mlp.down_proj.lora_B["default"].weight.data.normal_()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    random_state = torch.get_rng_state()
    startup_proof.prepare(model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def with_rope(family: str, **rope: Any) -> Any:
    """A random small model of that class whose texts are scaled beyond 32 tokens."""
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, f"{family}Config")(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        max_position_embeddings=32,
        original_max_position_embeddings=32,
        rope_parameters={"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, **rope},
    )
    return getattr(transformers, f"{family}ForCausalLM")(settings).eval()


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("family", "rope"), [("Phi3", LONGROPE), ("Llama", {"rope_type": "dynamic"}), ("Qwen2", {"rope_type": "dynamic"})]
)
def test_positions_that_follow_the_longest_text_of_a_pack_are_refused_by_name(
    family: str, rope: dict[str, Any]
) -> None:
    with pytest.raises(
        ConfigError, match=rf"{family}RotaryEmbedding \(model.rotary_emb\): rope_type '{rope['rope_type']}'"
    ):
        startup_proof.prepare(with_rope(family, **rope))


def test_every_kind_of_layer_has_its_own_positions_judged() -> None:
    model = with_rope("Llama", rope_type="linear")
    model.model.rotary_emb.rope_type = {"full_attention": "linear", "sliding_attention": "dynamic"}
    with pytest.raises(ConfigError, match="rope_type 'dynamic'"):
        startup_proof.prepare(model)


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_positions_scaled_by_a_constant_are_the_same_in_any_pack(rope_type: str) -> None:
    model = with_rope("Llama", rope_type=rope_type)
    texts = [episode("short", reward=1.0), episode("long", reward=1.0, shape=((60, 60),))]
    with torch.no_grad():
        alone = [action_logprobs(model, text) for text in texts]
    startup_proof.prepare(model)
    pack = join([action_tensors(text, model.device) for text in texts])
    for packed_N, alone_N in zip(pack.per_segment(score(model, pack).logprob_N), alone, strict=True):
        torch.testing.assert_close(packed_N, alone_N, rtol=0, atol=1e-5)


def test_attention_across_segments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.gradient import attention

    monkeypatch.setattr(attention, "segment_arguments", lambda bounds, device: {})
    with pytest.raises(ConfigError, match="packed episodes"):
        startup_proof.prepare(architecture("Llama"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Qwen3", "Qwen2-tied", "Llama"])
def test_norms_and_sums_on_a_gpu_are_autograds(name: str, dtype: torch.dtype) -> None:
    """The proof itself: packed log-probabilities, score norms and the weighted sum against autograd, on the GPU."""
    startup_proof.prepare(architecture(name).to("cuda", dtype))
