"""The learner's state on disk: a resumed learner is bit-identical; incomplete and foreign checkpoints are refused."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.errors import ConfigError, LearnerError
from tests.trainer.trainer_builders import (
    architecture,
    batch,
    config,
    divide_small_weights,
    mixed_groups,
    whole_weights,
)
from trainer import checkpoint, deepspeed_settings, whole_folder
from trainer.learner import Learner

SETTINGS = {"lr": 1e-3, "grad_clip": 0.05, "weight_decay": 0.01}
SCHEDULE = {"warmup_steps": 3, "schedule": "cosine"}


def steps(learner: Learner, groups: list[Any], first: int, end: int) -> None:
    for version in range(first, end):
        learner.step(batch(groups, version=version, max_lag=end))


@pytest.mark.parametrize(
    ("dtype", "zero_stage", "offload"),
    [
        *(("float32", zero_stage, False) for zero_stage in range(4)),
        *(("bfloat16", zero_stage, zero_stage >= 2) for zero_stage in range(4)),
    ],
)
def test_going_on_from_a_checkpoint_is_bit_identical_to_never_having_stopped(
    tiny_model_dir: Path,
    tiny_model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    zero_stage: int,
    offload: bool,
    dtype: str,
) -> None:
    monkeypatch.setattr(deepspeed_settings, "deepspeed_config", deepspeed_settings.deepspeed_config)
    divide_small_weights()
    settings = {**SETTINGS, "zero_stage": zero_stage, "offload_optimizer": offload, **SCHEDULE}
    sections: dict[str, Any] = {"dtype": dtype, "learner": settings, "algorithm": {"rho_base": "auto"}}
    sections["train"] = {"steps": 5}
    groups = mixed_groups(tiny_model)
    whole = Learner(config(tiny_model_dir, **sections))
    steps(whole, groups, 0, 2)
    folder = checkpoint.save(whole, tmp_path, keep=1)
    at_two = whole_weights(whole.model)
    steps(whole, groups, 2, 4)
    again = Learner(config(tiny_model_dir, seed=7, **sections))
    assert checkpoint.load(again, tmp_path) == folder == tmp_path / "v2"
    assert torch.equal(whole_weights(again.model), at_two)
    steps(again, groups, 2, 4)
    assert torch.equal(whole_weights(again.model), whole_weights(whole.model))
    assert again.state_dict() == whole.state_dict()


def test_adapters_go_on_too_and_frozen_weights_are_not_written(
    tiny_model_dir: Path, tiny_model: Any, tmp_path: Path
) -> None:
    model = {"path": str(tiny_model_dir), "reference": "initial", "lora": {"rank": 2}}
    settings = config(tiny_model_dir, learner=SETTINGS, model=model, algorithm={"preset": "tba", "kl_beta_steps": 2})
    groups = mixed_groups(tiny_model)
    whole, again = Learner(settings), Learner(settings)
    steps(whole, groups, 0, 1)
    folder = checkpoint.save(whole, tmp_path, keep=1)
    steps(whole, groups, 1, 2)
    checkpoint.load(again, tmp_path)
    steps(again, groups, 1, 2)
    assert torch.equal(whole_weights(again.model), whole_weights(whole.model))
    rewritten(setup={"frozen": "elsewhere"})(folder)
    with pytest.raises(ConfigError, match=r"model\.path=elsewhere"):
        checkpoint.load(again, folder)
    assert sum(file.stat().st_size for file in folder.rglob("*.pt")) < 4 * sum(
        p.numel() for p in tiny_model.parameters()
    )


@pytest.fixture(scope="module")
def learner(tiny_model_dir: Path) -> Learner:
    return Learner(config(tiny_model_dir, learner=SETTINGS, algorithm={"rho_base": "auto"}))


@pytest.fixture(scope="module")
def saved(learner: Learner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests copy and damage."""
    return checkpoint.save(learner, tmp_path_factory.mktemp("saved"), keep=1)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "v0"))


def test_random_numbers_go_on_too(learner: Learner, tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    checkpoint.save(learner, tmp_path, keep=1)
    expected = draw()
    assert draw() != expected
    checkpoint.load(learner, tmp_path)
    assert draw() == expected


def test_only_the_newest_are_kept_and_what_a_killed_writer_left_is_removed(learner: Learner, tmp_path: Path) -> None:
    (tmp_path / ".v3.writing").mkdir()
    for version in (2, 4, 6):
        learner.policy_version = version
        checkpoint.save(learner, tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v4", "v6"]
    assert checkpoint.newest(tmp_path).name == "v6"
    learner.policy_version = 5  # as if resumed from 4: then 6 belongs to an abandoned run
    checkpoint.save(learner, tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v4", "v5"]


def test_the_same_version_may_be_written_again(learner: Learner, tmp_path: Path) -> None:
    for _ in range(2):
        checkpoint.save(learner, tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == [f"v{learner.policy_version}"]
    checkpoint.load(learner, tmp_path)


@pytest.mark.parametrize(("module", "failing"), [(checkpoint, "_write_manifest"), (whole_folder, "flush")])
def test_a_checkpoint_that_cannot_be_written_never_appears(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, failing: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    learner.policy_version = 1
    checkpoint.save(learner, tmp_path, keep=1)
    learner.policy_version = 2
    monkeypatch.setattr(module, failing, full)
    with pytest.raises(LearnerError, match=r"v2.*No space left"):
        checkpoint.save(learner, tmp_path, keep=1)
    assert checkpoint.newest(tmp_path).name == "v1"
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def cut(folder: Path) -> None:
    file = folder / "rank_0.pt"
    file.write_bytes(file.read_bytes()[:100])


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: next(folder.rglob(name)).unlink()


def rewritten(**changes: Any) -> Callable[[Path], None]:
    """Changes the manifest; a nested change is merged."""

    def change(folder: Path) -> None:
        manifest = json.loads((folder / "checkpoint.json").read_text())
        for key, value in changes.items():
            manifest[key] = {**manifest[key], **value} if isinstance(value, dict) else value
        (folder / "checkpoint.json").write_text(json.dumps(manifest))

    return change


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file is cut": (cut, r"incomplete: rank_0\.pt has 100 of \d+ bytes; delete it"),
    "a file is gone": (without("*optim_states.pt"), r"incomplete: deepspeed/.*optim_states\.pt has 0 of"),
    "no manifest": (without("checkpoint.json"), r"incomplete checkpoint.*delete it, and resume from .*v7"),
    "not a manifest": (rewritten(learner=None), "not written by this version"),
    "a later format": (rewritten(format=2), "has format 2, this version of agentrl reads 1"),
    "other ranks": (rewritten(setup={"num_ranks": 2}), r"learner\.num_ranks=2, this learner has 1: start with 2"),
    "another stage": (rewritten(setup={"zero_stage": 3}), r"learner\.zero_stage=3, this learner has 1"),
    "another type": (rewritten(setup={"dtype": "bfloat16"}), r"model\.dtype=bfloat16, this learner has float32"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_incomplete_and_foreign_checkpoints_are_refused_with_the_fix(learner: Learner, folder: Path, case: str) -> None:
    shutil.copytree(folder, folder.with_name("v7"))
    damage, message = BROKEN[case]
    damage(folder)
    before = whole_weights(learner.model)
    with pytest.raises(ConfigError, match=message):
        checkpoint.load(learner, folder)
    assert torch.equal(whole_weights(learner.model), before)


def test_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    architecture("Qwen3").save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="saved from another model"):
        checkpoint.load(Learner(config(tmp_path / "other")), folder)


@pytest.mark.parametrize("name", [".", "nowhere"])
def test_where_there_is_none_is_said(learner: Learner, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no checkpoint of a learner there"):
        checkpoint.load(learner, tmp_path / name)


def test_what_the_config_sets_is_the_configs(tiny_model_dir: Path, folder: Path) -> None:
    rewritten(learner={"rho_base": {"fixed": 0.6, "on_policy": [0.6] * 5}})(folder)
    learner = Learner(config(tiny_model_dir, learner={"lr": 3e-4, "weight_decay": 0.2}, algorithm={"rho_base": 0.9}))
    checkpoint.load(learner, folder)
    group = learner.engine.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (3e-4, 0.2)
    assert learner.state_dict()["rho_base"]["fixed"] == 0.9


def test_a_learned_rho_base_comes_back_and_is_told(
    learner: Learner, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"rho_base": {"fixed": 0.6, "on_policy": [0.6] * 5}, "skipped_steps": 3, "policy_version": 12}
    rewritten(learner=state)(folder)
    with caplog.at_level(logging.INFO):
        checkpoint.load(learner, folder)
    assert "rho_base is 0.600" in caplog.text and "resumed at version 12" in caplog.text
    assert learner.state_dict()["skipped_steps"] == 3
