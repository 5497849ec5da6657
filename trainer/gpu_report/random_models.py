"""Random models for the measurements, in Hugging Face layout, and their own logprobs. Independent of servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.types import Probe, Sampling

ARCHITECTURES = ("Qwen2", "Qwen3", "Llama")
LOGIT_STD = 3.0
"""Of the logits of one position: about what a trained model has. A random one of usual initialisation has far less."""
MAX_POSITIONS = 8192
PROBE_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a decoder."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 768


QUICKSTART = Shape(
    hidden_size=128, intermediate_size=512, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32
)  # of configs/quickstart.yaml
BY_SIZE = {
    "1 MB": Shape(hidden_size=64, intermediate_size=192, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=32),
    "50 MB": Shape(
        hidden_size=384,
        intermediate_size=1152,
        num_layers=6,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=4096,
    ),
    "500 MB": Shape(
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=9,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=8192,
    ),
    "2 GB": Shape(
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=9,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=16384,
    ),
}


def make(
    architecture: str,
    shape: Shape,
    *,
    tied: bool,
    dtype: str = "float32",
    seed: int = 0,
    initializer_range: float = 0.05,
) -> Any:
    """A random model whose logits are spread like a trained one's, in evaluation mode."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()

    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=initializer_range,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype=dtype,
    )
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    ids = torch.randint(shape.vocab_size, (1, PROBE_TOKENS))
    with torch.no_grad():
        model.model.norm.weight.mul_(LOGIT_STD / model(ids).logits.std(dim=-1).mean())
    # Weights alone, as where a model is loaded: `to` would also round the frequencies of rotary positions, and logprobs
    # would then drift from an engine's by nats within 2,000 tokens.
    for weight in model.parameters():
        weight.data = weight.data.to(getattr(torch, dtype))
    return model


def save(model: Any, folder: Path) -> Path:
    """Model and tokenizer. The tokenizer knows no end of text: every generation has the length that was asked for."""
    from trainer.warmstart.tiny_model import make_tokenizer

    model.save_pretrained(folder, max_shard_size="1000GB")
    tokenizer = make_tokenizer(["def f(x):\n    return x\n"] * 4, min(model.config.vocab_size, 300))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return folder


def disturb(model: Any, *, scale: float, seed: int) -> None:
    """Change every weight a little, in place."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (scale * parameter.std()))


@torch.no_grad()
def logits(model: Any, token_ids: Sequence[int], *, float32_head: bool = True) -> Tensor:
    """Of the next token after each: float32. [T] -> [T, V]

    They are computed in float32 from the final hidden states, as engine and learner do; without `float32_head` in the
    model's dtype, as transformers does.
    """
    ids_1T = torch.tensor([token_ids], device=model.device)
    if not float32_head:
        rounded_TV: Tensor = model(ids_1T, use_cache=False).logits[0]
        return rounded_TV.float().cpu()
    hidden_TD = model.base_model(ids_1T, use_cache=False).last_hidden_state[0]
    logits_TV: Tensor = hidden_TD.float() @ model.get_output_embeddings().weight.float().t()
    return logits_TV.cpu()


def logprobs(
    model: Any,
    token_ids: Sequence[int],
    sampling: Sampling | None = None,
    *,
    start: int = 1,
    float32_head: bool = True,
) -> list[float]:
    """Log p(token[t] | token[:t]) for t >= start, of the distribution that `sampling` draws from. [T] -> [T - start]"""
    logits_TV = logits(model, token_ids, float32_head=float32_head)[start - 1 : -1]
    if sampling is not None:
        logits_TV = shaped(logits_TV, sampling)
    chosen_T1 = torch.tensor(token_ids)[start:, None]
    result: list[float] = logits_TV.log_softmax(dim=-1).gather(1, chosen_T1)[:, 0].tolist()
    return result


def shaped(logits_TV: Tensor, sampling: Sampling) -> Tensor:
    """Divide by the temperature, then keep the top k, then of these the fewest whose probability reaches top_p."""
    logits_TV = logits_TV / sampling.temperature
    if sampling.top_k > 0:
        least_T1 = logits_TV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_TV = logits_TV.masked_fill(logits_TV < least_T1, -torch.inf)
    if sampling.top_p < 1:
        ordered_TV, order_TV = logits_TV.sort(dim=-1, descending=True)
        before_TV = ordered_TV.softmax(dim=-1).cumsum(dim=-1) - ordered_TV.softmax(dim=-1)
        dropped_TV = torch.zeros_like(order_TV, dtype=torch.bool).scatter(1, order_TV, before_TV >= sampling.top_p)
        logits_TV = logits_TV.masked_fill(dropped_TV, -torch.inf)
    return logits_TV


def probe(model: Any) -> Probe:
    """A text and the model's logprobs of it."""
    ids = tuple((7 * i) % model.config.vocab_size for i in range(PROBE_TOKENS))
    return Probe(token_ids=ids, logprobs=tuple(logprobs(model, ids)))
