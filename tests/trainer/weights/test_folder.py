"""Folders of weights: whole or absent, in shards if large, readable by transformers, old versions removed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.engine.checksum import checksum_of
from agentrl.training.model_folder import Origin, origin_of
from agentrl.types import Probe, WeightsRef
from trainer.weights import folder as weights
from trainer.weights.source import WeightSource

PROBE = Probe(token_ids=(1, 2, 3), logprobs=(-1.0, -2.0))
ONE_LAYER_BYTES = 200_000  # of the tiny model, approximately


def source_of(model: Any) -> WeightSource:
    return WeightSource(model, dtype=torch.float32)


def publish(model: Any, root: Path, version: int, **limits: int) -> WeightsRef:
    return weights.publish(source_of(model), root, policy_version=version, probe=PROBE, **limits)


def folder_of(ref: WeightsRef) -> Path:
    assert ref.path is not None
    return Path(ref.path)


def test_published_tensors_have_the_models_names_and_values(tiny_model: Any, tmp_path: Path) -> None:
    stored = load_file(folder_of(publish(tiny_model, tmp_path, 3)) / "model.safetensors")
    assert set(stored) == {name for name, _ in tiny_model.named_parameters()}
    assert all(torch.equal(stored[name], parameter) for name, parameter in tiny_model.named_parameters())


def test_bytes_and_checksum_are_those_of_the_tensors(tiny_model: Any, tmp_path: Path) -> None:
    ref = publish(tiny_model, tmp_path, 3)
    stored = load_file(folder_of(ref) / "model.safetensors")
    assert ref.num_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert ref.checksum == checksum_of(stored.items())
    assert ref.probe == PROBE and folder_of(ref).parent == tmp_path
    assert re.fullmatch(r"v3-[0-9a-f]{8}", folder_of(ref).name)


def test_a_larger_model_is_written_in_shards_that_keep_layers_whole(tiny_model: Any, tmp_path: Path) -> None:
    ref = publish(tiny_model, tmp_path, 0, max_shard_bytes=ONE_LAYER_BYTES)
    index = json.loads((folder_of(ref) / "model.safetensors.index.json").read_text())
    shards = {file.name: load_file(file) for file in folder_of(ref).glob("model-*.safetensors")}
    assert sorted(shards) == [f"model-{at:05d}-of-{len(shards):05d}.safetensors" for at in range(1, len(shards) + 1)]
    assert len(shards) > 1
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    assert index["metadata"]["total_size"] == ref.num_bytes
    for layer in range(2):
        assert len({file for name, file in index["weight_map"].items() if f"layers.{layer}." in name}) == 1
    everything = {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}
    assert checksum_of(everything.items()) == ref.checksum == publish(tiny_model, tmp_path, 1).checksum


def test_only_the_last_two_folders_stay(tiny_model: Any, tmp_path: Path) -> None:
    """Also where a restarted learner is at an older version: engines still hold the newer one of the first."""
    refs = [publish(tiny_model, tmp_path, version) for version in (0, 1, 2, 1)]
    assert set(tmp_path.iterdir()) == {folder_of(ref) for ref in refs[-2:]}
    assert folder_of(refs[1]) != folder_of(refs[3]), "a path that another machine may have cached was written again"


def test_publishing_a_version_again_replaces_it(tiny_model: Any, tmp_path: Path) -> None:
    publish(tiny_model, tmp_path, 0, max_shard_bytes=ONE_LAYER_BYTES)
    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(2.0)
    ref = publish(tiny_model, tmp_path, 0)
    assert (load_file(folder_of(ref) / "model.safetensors")["model.norm.weight"] == 2.0).all()
    assert [path.name for path in folder_of(ref).iterdir()] == ["model.safetensors"]


class FailingSource(WeightSource):
    """A source that raises after the first shard was written."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().__iter__():
            if "norm.weight" in name and "layers" not in name:
                raise RuntimeError("the other rank died")
            yield name, tensor


def test_a_failed_write_leaves_nothing(tiny_model: Any, tmp_path: Path) -> None:
    source = FailingSource(tiny_model, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="the other rank died"):
        weights.publish(source, tmp_path, policy_version=0, probe=PROBE, max_shard_bytes=ONE_LAYER_BYTES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("max_shard_bytes", [2**30, ONE_LAYER_BYTES])
def test_an_export_loads_as_a_model_and_a_tokenizer(
    tiny_model: Any, tiny_model_dir: Path, tmp_path: Path, max_shard_bytes: int
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(0.5)
    folder = tmp_path / "checkpoints" / "step_1"
    weights.export(
        source_of(tiny_model),
        tiny_model,
        str(tiny_model_dir),
        folder,
        origin=Origin(run="quick", version=1),
        max_shard_bytes=max_shard_bytes,
    )
    assert origin_of(folder) == Origin(run="quick", version=1)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.float32
    assert {name: p.tolist() for name, p in loaded.named_parameters()} == {
        name: p.tolist() for name, p in tiny_model.named_parameters()
    }
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (folder, tiny_model_dir))
    assert ours.encode("print(42)") == theirs.encode("print(42)") and ours.chat_template == theirs.chat_template
