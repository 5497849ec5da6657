"""Trajectories of 32k and 128k tokens, divided between two ranks, give the numbers of one rank."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.trainer.equality import Setting, difference, on_two_ranks, outcome
from tests.trainer.trainer_builders import VOCAB
from trainer import deepspeed_settings

LONG = Setting(
    zero_stage=3,
    checkpointing=True,
    offload_activations=True,
    mlp_tiles=4,
    sequence_parallel=2,
    num_steps=1,
    algorithm={"preset": "grpo"},
)

LONG_ON_ONE = Setting(num_steps=1, algorithm=LONG.algorithm)


@pytest.fixture(scope="module")
def small_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with two heads: attention over 32k tokens takes 10 s on one core."""
    import transformers

    torch.manual_seed(0)
    settings = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2**17,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    folder = tmp_path_factory.mktemp("long")
    transformers.Qwen3ForCausalLM(settings).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_32k_tokens_on_two_ranks_are_those_on_one(
    small_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_on_two_ranks(small_model_dir, tmp_path, monkeypatch, longest=2**15)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_128k_tokens_on_two_ranks_are_those_on_one(
    small_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_on_two_ranks(small_model_dir, tmp_path, monkeypatch, longest=2**17)


def assert_same_on_two_ranks(model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, longest: int) -> None:
    monkeypatch.setattr(deepspeed_settings, "deepspeed_config", deepspeed_settings.deepspeed_config)
    setting = replace(LONG, longest=longest)
    (two,) = on_two_ranks(model_dir, [setting], folder / "out.pt", timeout_s=3000)
    one = outcome(model_dir, replace(LONG_ON_ONE, longest=longest))
    found = difference(two, one)
    if longest == 2**17:
        print(json.dumps(asdict(found)))  # noqa: T201
    assert found.log_weight < 1e-3  # a sum over 700 actions
    assert found.grad_norm < 1e-5 and found.update < 1e-4 and found.weight < 1e-6
