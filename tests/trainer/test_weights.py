"""Folders of weights: whole or absent, readable by transformers, old versions gone, the probe true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_builders import plain_logprobs

from trainer import weights

PROBE = list(range(20))


def publish(model: Any, root: Path, version: int) -> Any:
    with torch.no_grad():
        return weights.publish(
            model, root, policy_version=version, probe_ids=PROBE, score=lambda ids: plain_logprobs(model, ids).tolist()
        )


def test_published_tensors_have_the_models_names_and_values(tiny_model: Any, tmp_path: Path) -> None:
    ref = publish(tiny_model, tmp_path, 3)
    stored = load_file(Path(ref.path) / "model.safetensors")
    assert set(stored) == {name for name, _ in tiny_model.named_parameters()}
    assert all(torch.equal(stored[name], parameter) for name, parameter in tiny_model.named_parameters())
    assert ref.num_bytes == (Path(ref.path) / "model.safetensors").stat().st_size
    assert len(ref.probe.logprobs) == len(PROBE) - 1


def test_only_the_last_two_versions_stay(tiny_model: Any, tmp_path: Path) -> None:
    for version in range(4):
        publish(tiny_model, tmp_path, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v2", "v3"]


def test_publishing_a_version_again_replaces_it(tiny_model: Any, tmp_path: Path) -> None:
    publish(tiny_model, tmp_path, 0)
    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(2.0)
    ref = publish(tiny_model, tmp_path, 0)
    assert (load_file(Path(ref.path) / "model.safetensors")["model.norm.weight"] == 2.0).all()


def test_a_failed_write_leaves_nothing(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_written(folder: Path, **_: Any) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(tiny_model, "save_pretrained", half_written)
    with pytest.raises(OSError, match="no space"):
        publish(tiny_model, tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_an_export_loads_as_a_model_and_a_tokenizer(tiny_model: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(0.5)
    folder = tmp_path / "checkpoints" / "step_1"
    weights.export(tiny_model, str(tiny_model_dir), folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.model.norm.weight, tiny_model.model.norm.weight)
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (folder, tiny_model_dir))
    assert ours.encode("print(42)") == theirs.encode("print(42)") and ours.chat_template == theirs.chat_template
