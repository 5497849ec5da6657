"""A config that is wrong is refused with every problem at once: file and line, key, what to write."""

from pathlib import Path

import pytest

from agentrl.config import InvalidConfig, load
from agentrl.errors import ConfigError

GOOD = "name: mine\nenv:\n  target: ModMath-v0\nmodel:\n  path: models/mine\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "saying"),
    [
        ("", " is empty"),
        ("- a\n", " holds a list"),
        ("name: mine\nenv:\n\ttarget: A\n", ":3: not valid YAML: a tab; indent with spaces"),
        ("name: mine\nenv: {target: x\nmodel: y\n", ":3: not valid YAML: expected ',' or '}', but got ':' (while"),
        (GOOD + "env:\n  max_turns: 3\n", ":6: env is given twice, first in line 2"),
        ("name: \x00\n", "not valid YAML"),
    ],
)
def test_yaml_that_cannot_be_read_has_a_line(tmp_path: Path, text: str, saying: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert str(refused.value).startswith(str(path)) and saying in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_all_problems_are_named_with_their_places(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + "learner:\n  learning_rate: 1\ntrain:\n  steps: five\n")
    with pytest.raises(InvalidConfig) as refused:
        load(path, ["rollout.group_size=0", "lerner.lr=1", "algorithm.preset=grop", "train.stall_timeout_s"])
    assert set(refused.value.problems) == {
        f"{path}:7: learner.learning_rate: unknown key; did you mean learner.lr?",
        f"{path}:9: train.steps must be an integer > 0; got 'five'",
        "overrides: rollout.group_size must be an integer >= 1; got 0",
        "overrides: lerner: unknown key; did you mean learner?",
        "overrides: algorithm.preset must be one of vcpo_safe, vcpo, vcpo_published, grpo, dapo, gspo, tis, mis, "
        "cispo, rloo, opo, otb, m2po, bapo, vtrace, reinforce, tba, distill, imitate; got 'grop'; did you mean grpo?; "
        "`agentrl config --describe algorithm.preset` "
        "explains them",
        "overrides: 'train.stall_timeout_s' is not section.key=value: write train.stall_timeout_s=VALUE",
    }


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("rollout.group_size=1", ("algorithm.baseline=opob_safe", "rollout.group_size")),
        ("rollout.max_turn_tokens=4096", ("rollout.max_turn_tokens=4096", "rollout.max_context=2048")),
        ("learner.warmup_steps=100", ("learner.warmup_steps=100", "train.steps=100")),
        ("rollout.temperature=0.5", ("rollout.temperature=0.5", "eval.temperature")),
        ("engine.sleep_while_training=true", ("engine.sleep_while_training", "rollout.max_lag=2")),
        ("engine.url=[]", ("engine: url is an empty list",)),
    ],
)
def test_a_conflict_names_its_keys_and_shows_no_dump(tmp_path: Path, override: str, keys: tuple[str, ...]) -> None:
    with pytest.raises(InvalidConfig) as refused:
        load(written(tmp_path, GOOD), [override])
    [problem] = refused.value.problems
    assert all(key in problem for key in keys)
    assert "{" not in problem and "got" not in problem


@pytest.mark.parametrize("number", ["nan", ".nan", ".inf", "-.inf", "1,5"])
def test_what_is_no_finite_number_is_refused(tmp_path: Path, number: str) -> None:
    with pytest.raises(InvalidConfig, match=r"learner\.lr must be a number > 0; got"):
        load(written(tmp_path, GOOD), [f"learner.lr={number}"])


@pytest.mark.parametrize("typed", [["train.steps", "5"], ["train.steps", "=", "5"], ["train.steps:5"], ["steps", "5"]])
def test_a_key_without_its_equals_sign_is_completed(tmp_path: Path, typed: list[str]) -> None:
    with pytest.raises(InvalidConfig, match=r"write train\.steps=5"):
        load(written(tmp_path, GOOD), typed)


def test_a_merge_key_of_yaml_is_no_duplicate(tmp_path: Path) -> None:
    text = "name: mine\nenv: &env {target: A}\nmodel: {path: m}\n"
    assert load(written(tmp_path, text.replace("env: &env {target: A}", "env:\n  <<: {target: A}"))).env.target == "A"
