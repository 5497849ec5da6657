"""Counting bytes and operations, by hand and over a model without content."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.config import Config, load
from agentrl.errors import ConfigError
from tests.trainer.trainer_builders import config
from trainer.plan.counting import Counter
from trainer.plan.dry_pass import measure, planned_model, settings_of

ROOT = Path(__file__).parents[3]
SEVEN = ROOT / "tests" / "data" / "models" / "qwen2.5-7b.json"


def test_bytes_and_operations_by_hand() -> None:
    before = torch.ones(10, 20)
    with Counter("cpu", known=[before]) as counter:
        product = before @ torch.ones(20, 5)  # 400 bytes, then 200
        assert counter.now_bytes == 200  # the right factor is gone
        assert counter.matrix_flop == 2 * 10 * 20 * 5
        view = product.t()
        del product
        assert counter.now_bytes == 200  # the view keeps it
        assert counter.peak_bytes == 600
        moved = counter.moved_bytes
        view.mul_(2)  # reads and writes 200 bytes; its result is its argument
        assert counter.moved_bytes - moved == 400
        counter.start_phase()
        assert counter.peak_bytes == 200
    del view
    assert counter.now_bytes == 0


def test_what_the_host_reads_from_a_tensor_without_content_is_zero() -> None:
    ids = torch.zeros(7, dtype=torch.int64, device="meta")
    with Counter("meta"):
        assert int(ids.sum()) == 0


def planned(*overrides: str) -> Config:
    return load(ROOT / "configs" / "aime_8gpu.yaml", overrides)


def test_operations_of_a_7b_pass_by_hand() -> None:
    """Forward, recomputation and backward: 8 a matrix parameter and token; attention: forward twice, backward 2.5 times
    a forward. torch may leave out the recomputation of a layer's last product, which no backward needs."""
    settings = settings_of(planned(), SEVEN)
    cost = measure(planned_model(planned(), settings), "plain", 4096, 4096)
    head, embedding = 152064 * 3584, 152064 * 3584
    matrices = 7_615_616_512 - head - embedding
    attention = 28 * (2 * 2 + 5) * 4096**2 * 28 * 128
    whole, last = 4096 * (8 * matrices + 8 * head) + attention, 4096 * 2 * 28 * 3584 * 18944
    assert 0.99 * (whole - last) < cost.matrix_flop < 1.01 * whole


def test_memory_of_a_pass_grows_with_its_tokens_and_not_with_its_kind() -> None:
    settings = settings_of(planned(), SEVEN)
    model = planned_model(planned(), settings)
    peaks = {length: measure(model, "exact", length, length).peak_bytes for length in (16384, 65536)}
    assert 8e9 < peaks[16384] < 11e9 and 2.5 * peaks[16384] < peaks[65536] < 4 * peaks[16384]
    whole = planned("learner.gradient_checkpointing=false")
    kept = measure(planned_model(whole, settings), "exact", 16384, 16384)
    assert kept.peak_bytes > 5 * peaks[16384]


def test_a_model_that_the_learner_refuses_is_refused_here_too(tmp_path: Path) -> None:
    import transformers

    transformers.Gemma2Config(num_hidden_layers=1, hidden_size=32, head_dim=8, intermediate_size=32).save_pretrained(
        tmp_path
    )
    refused = config(tmp_path)
    with pytest.raises(ConfigError, match="cannot be split by trajectory exactly"):
        planned_model(refused, settings_of(refused, None))


def test_the_warm_start_s_model_needs_no_file(tmp_path: Path) -> None:
    settings = load(ROOT / "configs" / "quickstart.yaml", [f"model.path={tmp_path / 'none'}"])
    assert settings_of(settings, None).hidden_size == 128
