"""A model folder that is not whole is refused, with the file and what to do; by a run and by doctor."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from agentrl.cli.doctor import config_checks
from agentrl.cli.doctor.findings import crashed
from agentrl.config import parse
from agentrl.engine.model_files import INDEX, check_files
from agentrl.errors import ConfigError
from agentrl.training.model_folder import check_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 16\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model of two shards."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for number, name in enumerate(names):
        save_file({f"w{number}": np.zeros(64, np.float32)}, tmp_path / name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w0": names[0], "w1": names[1]}}))
    return tmp_path


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        lambda f: (f / "config.json").unlink(),
        "has weights (model-00001-of-00002.safetensors) and no config",
    ),
    "cut config": (lambda f: (f / "config.json").write_text('{"model_'), "config.json is not valid JSON"),
    "empty config": (lambda f: (f / "config.json").write_text(""), "config.json is empty"),
    "list": (lambda f: (f / "config.json").write_text("[]"), "config.json holds a list"),
    "pointer config": (lambda f: (f / "config.json").write_text(POINTER), "is a git-lfs pointer, not the file; run"),
    "cut shard": (lambda f: cut(f / "model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors is cut off"),
    "text shard": (lambda f: (f / "model-00002-of-00002.safetensors").write_text("oops"), "is cut off or damaged"),
    "empty shard": (lambda f: (f / "model-00001-of-00002.safetensors").write_text(""), "safetensors is empty"),
    "pointer": (lambda f: (f / "model-00001-of-00002.safetensors").write_text(POINTER), "is a git-lfs pointer"),
    "no shard": (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "is missing, 1 of 2 files of model.safe"),
    "cut index": (lambda f: cut(f / INDEX), f"{INDEX} is not valid JSON"),
    "other index": (lambda f: (f / INDEX).write_text("{}"), "has no weight_map"),
    "no weights": (lambda f: [file.unlink() for file in f.glob("model*")], "has a config.json but no weights"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
}


def test_a_whole_folder_passes(folder: Path) -> None:
    check_files(folder)


@pytest.mark.parametrize(("damage", "saying"), BROKEN.values(), ids=list(BROKEN))
def test_what_is_not_whole_is_named(folder: Path, damage: Callable[[Path], object], saying: str) -> None:
    damage(folder)
    tree = {"name": "t", "env": {"target": "ModMath-v0"}, "model": {"path": str(folder), "warmstart": {}}}
    config = parse(tree, source="test")
    with pytest.raises(ConfigError) as refused:
        check_model(config)
    assert saying in str(refused.value) and str(folder) in str(refused.value)
    assert len(str(refused.value)) < 500
    with pytest.raises(ConfigError) as found:
        config_checks.model(config)
    assert saying in crashed("model", found.value).found


def test_all_files_are_named(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        cut(file)
    with pytest.raises(ConfigError) as refused:
        check_files(folder)
    assert "model-00001" in str(refused.value) and "model-00002" in str(refused.value)
