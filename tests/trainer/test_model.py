"""The policy as it is trained: layers recomputed in the backward, without the dropout of training mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import LoraConfig
from tests.trainer.trainer_builders import VOCAB, config, episode
from trainer import lora, startup_proof
from trainer.gradient.logprobs import score
from trainer.learner import Learner
from trainer.model import checkpoint_layers
from trainer.packing import action_tensors, join


def with_dropout_in_its_layers() -> Any:
    """OPT, whose layers apply dropout depending on their own training flag."""
    import transformers

    torch.manual_seed(0)
    settings = transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        dropout=0.5,
    )
    adapted = lora.with_adapters(
        transformers.OPTForCausalLM(settings), LoraConfig(rank=4, alpha=8, target_modules="all-linear")
    )
    return adapted.eval()


def test_checkpointed_layers_keep_their_dropout_off() -> None:
    model = with_dropout_in_its_layers()
    pack = join([action_tensors(episode("a", reward=1.0), model.device)])
    startup_proof.prepare(model)
    before_N = score(model, pack).logprob_N
    checkpoint_layers(model)
    startup_proof.prepare(model)
    assert torch.equal(score(model, pack).logprob_N, before_N)
    assert model.get_base_model().is_gradient_checkpointing


def test_the_model_is_judged_with_its_layers_checkpointed(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[bool] = []
    monkeypatch.setattr(startup_proof, "prepare", lambda model, **_: judged.append(model.is_gradient_checkpointing))
    Learner(config(tiny_model_dir, learner={"gradient_checkpointing": True}))
    Learner(config(tiny_model_dir, learner={"gradient_checkpointing": False}))
    assert judged == [True, False]
