"""A name that is no key leads to the key that is meant; every key that a synonym leads to exists."""

import pytest

from agentrl.config import reference
from agentrl.config.suggestions import ABSENT, SYNONYMS, hint, suggestions

PATHS = reference.key_paths()
NAMES = {path.rpartition(".")[2] for path in PATHS}


def test_every_synonym_leads_to_keys_that_exist() -> None:
    assert {path for keys in SYNONYMS.values() for path in keys} <= set(PATHS)


@pytest.mark.parametrize("names", [SYNONYMS, ABSENT])
def test_no_name_in_the_tables_is_a_key(names: dict[str, object]) -> None:
    assert {name for name in names if name in PATHS} == set()


@pytest.mark.parametrize(
    ("name", "near", "keys"),
    [
        ("learning_rate", "", ["learner.lr"]),
        ("learner.learning_rate", "", ["learner.lr"]),
        ("learner.lrr", "", ["learner.lr"]),
        ("lerner", "", ["learner"]),
        ("lerner.lr", "", ["learner.lr", "model.warmstart.lr"]),
        ("steps", "", ["train.steps", "model.warmstart.steps"]),
        ("--steps", "train", ["train.steps"]),
        ("--steps", "model.warmstart", ["model.warmstart.steps"]),
        ("--batch-size", "", ["rollout.groups_per_step", "model.warmstart.batch_size"]),
        ("num_generations", "", ["rollout.group_size"]),
        ("max_tokens", "", ["rollout.max_turn_tokens"]),
        ("temperature", "eval", ["eval.temperature"]),
        ("num_epochs", "", ["train.steps"]),
        ("gradient_accumulation_steps", "", ["rollout.groups_per_step", "learner.pack_tokens"]),
        ("model_name_or_path", "", ["model.path"]),
        ("train.step", "", ["train.steps"]),
        ("zzz", "", []),
    ],
)
def test_the_key_that_is_meant_comes_first(name: str, near: str, keys: list[str]) -> None:
    assert suggestions(name, PATHS, near=near) == keys


@pytest.mark.parametrize("name", ["beta", "learner.kl_coef", "--init-kl-coef"])
def test_what_agentrl_does_not_have_is_said(name: str) -> None:
    assert "no KL penalty" in hint(name, PATHS)
