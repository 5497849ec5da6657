"""A new run begins from the weights that another run exported: docs/resume.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import Config, WarmstartConfig
from agentrl.errors import ConfigError
from agentrl.tokens.tokenizer import load_tokenizer
from agentrl.training.model_folder import Origin, check_model, check_reference, check_trainable
from agentrl.types import user
from tests.trainer.trainer_builders import batch, config, mixed_groups, plain_logprobs
from trainer.learner import Learner
from trainer.weights import folder as weights
from trainer.weights.source import WeightSource

TEXT = list(range(100, 180))
LORA = {"rank": 4, "alpha": 8}


def of_model(path: Path, **model: Any) -> Config:
    return config(path, model={"path": str(path), "dtype": "float32", **model}, learner={"lr": 1e-2})


@pytest.mark.parametrize("first", [{}, {"lora": LORA}], ids=["all weights", "lora"])
@pytest.mark.parametrize("second", [{}, {"lora": LORA}], ids=["all weights", "lora"])
def test_the_second_run_begins_with_what_the_first_one_learned(
    tiny_model_dir: Path, tiny_model: Any, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    learner = Learner(of_model(tiny_model_dir, **first))
    untrained = plain_logprobs(learner.model, TEXT)
    learner.step(batch(mixed_groups(tiny_model)))
    trained = plain_logprobs(learner.model, TEXT)
    final = tmp_path / "runs/first/checkpoints/final"
    final.parent.mkdir(parents=True)
    source, origin = WeightSource(learner.model, dtype=torch.float32), Origin(run="first", version=1)
    weights.export(source, learner.model, str(tiny_model_dir), final, origin=origin)

    settings = of_model(final, **second)
    check_model(settings)
    check_trainable(settings)
    again = Learner(settings)
    assert again.policy_version == 0
    found = plain_logprobs(again.model, TEXT)
    assert torch.allclose(found, trained, atol=1e-5)
    assert not torch.allclose(found, untrained, atol=1e-5)
    again.step(batch(mixed_groups(tiny_model)))
    assert not torch.allclose(plain_logprobs(again.model, TEXT), found, atol=1e-5)

    ours, theirs = (load_tokenizer(of_model(path).model, str(path)) for path in (final, tiny_model_dir))
    assert ours.first_prompt([user("what is 17 * 3?")]) == theirs.first_prompt([user("what is 17 * 3?")])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "is a run's folder, not a model. Give weights that it exported: model.path=.*checkpoints/final$"),
        ("checkpoints", "model.path=.*checkpoints/final$"),
        ("checkpoints/states/v20", "model.path=.*checkpoints/final$"),
        ("checkpoints/final/adapter", "is an adapter, not a model. Give .*checkpoints/final,"),
    ],
)
def test_other_folders_of_a_run_are_refused_with_the_one_to_give(tmp_path: Path, given: str, says: str) -> None:
    run = tmp_path / "runs" / "first"
    for file in ("config.json", "checkpoints/states/v20/manifest.json", "checkpoints/final/config.json"):
        (run / file).parent.mkdir(parents=True, exist_ok=True)
        (run / file).write_text("{}")
    (run / "trajectories").mkdir()
    (run / "checkpoints/final/adapter").mkdir()
    (run / "checkpoints/final/adapter/adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=says):
        check_model(of_model(run / given))


def test_a_reference_is_checked_before_anything_is_started(tiny_model_dir: Path, tmp_path: Path) -> None:
    from trainer.warmstart.tiny_model import make_model, make_tokenizer, save

    tokenizer = make_tokenizer(["quite another text, with other merges"] * 9, 300)
    save(tmp_path / "other", make_model(WarmstartConfig(num_layers=1), tokenizer, seed=0), tokenizer)
    (tmp_path / "empty").mkdir()
    says = {
        str(tmp_path / "other"): r"another vocabulary than model\.path=.*; give a model with the policy's tokenizer",
        str(tmp_path / "empty"): r"model\.reference=.*empty is a folder without a config\.json",
        "/nowhere": r"model\.reference=/nowhere: its vocabulary cannot be read",
    }
    for given, expected in says.items():
        with pytest.raises(ConfigError, match=expected):
            check_reference(with_reference(tiny_model_dir, given))
    for given in ("initial", str(tiny_model_dir)):
        check_reference(with_reference(tiny_model_dir, given))


def with_reference(path: Path, given: str) -> Config:
    return config(path, model={"path": str(path), "reference": given}, algorithm={"preset": "distill"})
