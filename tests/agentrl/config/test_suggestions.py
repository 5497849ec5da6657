"""A name that is no key leads to the key that is meant; every key that a synonym leads to exists."""

import pytest

from agentrl.config import reference
from agentrl.config.suggestions import SYNONYMS, suggestions

PATHS = reference.key_paths()
NAMES = {path.rpartition(".")[2] for path in PATHS}


def test_every_synonym_leads_to_keys_that_exist() -> None:
    assert {path for keys in SYNONYMS.values() for path in keys} <= set(PATHS)


def test_no_synonym_is_a_key() -> None:
    assert {name for name in SYNONYMS if name in PATHS} == set()


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
        ("--init-kl-coef", "", ["algorithm.kl_beta"]),
        ("zzz", "", []),
    ],
)
def test_the_key_that_is_meant_comes_first(name: str, near: str, keys: list[str]) -> None:
    assert suggestions(name, PATHS, near=near) == keys
