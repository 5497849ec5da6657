"""The held-out sets of a config: what each takes from the run, and what is refused with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config import Config, InvalidConfig, load

RUN: dict[str, Any] = {
    "name": "mine",
    "env": {"target": "AimePython-v0", "kwargs": {"a": 1}, "wrappers": ["TurnCounter"], "max_turns": 4},
    "model": {"path": "m"},
    "eval": {"num_tasks": 30, "samples_per_task": 8, "temperature": 0.6, "top_p": 0.95},
}


def with_sets(sets: Any, **env: Any) -> dict[str, Any]:
    return {**RUN, "env": RUN["env"] | env, "eval": RUN["eval"] | {"sets": sets}}


def test_without_sets_the_only_one_is_the_runs_and_has_no_name() -> None:
    config = load(RUN)
    assert config.eval_sets == {"": config}


def test_a_set_takes_from_the_run_what_it_does_not_say() -> None:
    config = load(with_sets({"own": {}, "aime25": {"data": "AIME-2025", "num_tasks": 5, "top_p": 1}}, eval_data="rows"))
    own, other = config.eval_sets.values()
    assert list(config.eval_sets) == ["own", "aime25"]
    assert own.env == config.env
    assert own.eval == other.eval.model_copy(update={"num_tasks": 30, "top_p": 0.95})
    assert (other.eval.num_tasks, other.eval.samples_per_task, other.eval.temperature, other.eval.top_p) == (
        5,
        8,
        0.6,
        1,
    )
    assert other.env == config.env.model_copy(update={"eval_data": "AIME-2025"})
    assert own.eval.sets == other.eval.sets == {}
    assert own.model_copy(update={"env": config.env, "eval": config.eval}) == config, "nothing else is another"


def test_a_set_with_its_own_environment_takes_nothing_of_the_runs_environment() -> None:
    sets = {"own": {}, "sums": {"target": "Countdown-v0", "kwargs": {"b": 2}}}
    env = load(with_sets(sets, train_data="train", eval_data="rows", allow_overlap=True)).eval_sets["sums"].env
    assert (env.target, env.kwargs, env.wrappers, env.max_turns) == ("Countdown-v0", {"b": 2}, (), None)
    assert (env.train_data, env.eval_data, env.allow_overlap) == ("train", None, True)


def test_a_config_with_sets_can_be_saved_and_changed_by_key() -> None:
    config = load(with_sets({"aime25": {"data": "AIME-2025"}}))
    assert Config.model_validate_json(config.model_dump_json()) == config
    changed = load(config, ["eval.sets.aime25.num_tasks=3", "eval.sets.gsm8k.data=GSM8K"])
    assert {name: one.env.eval_data for name, one in changed.eval_sets.items()} == {
        "aime25": "AIME-2025",
        "gsm8k": "GSM8K",
    }
    assert changed.eval_sets["aime25"].eval.num_tasks == 3
    assert load(changed, ["eval.sets={}"]).eval_sets.keys() == {""}


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["AIME-2025"], "eval.sets: give each set a name, as in {aime25: {data: AIME-2025}}; got ['AIME-2025']"),
        ("AIME-2025", "eval.sets: give each set a name"),
        (None, "eval.sets: give each set a name, as in {aime25: {data: AIME-2025}}; got no value"),
        (
            {"aime25": "AIME-2025"},
            "eval.sets.aime25 must be a section with keys such as data, target, kwargs; got 'AIME",
        ),
        ({"aime25": None}, "eval.sets.aime25 must be a section with keys such as data, target, kwargs; got no value"),
        ({2025: {"data": "AIME-2025"}}, 'eval.sets: the name 2025 is not a text: write "2025" in quotes'),
        ({"a/b": {}}, "eval.sets: the name 'a/b' must be letters, digits, - and _"),
        ({"": {}}, "eval.sets: the name '' must be letters"),
        ({"..": {}}, "eval.sets: the name '..' must be letters"),
        ({"x" * 41: {}}, "at most 40"),
        ({"a": {"num_task": 4}}, "eval.sets.a.num_task: unknown key; did you mean eval.sets.a.num_tasks?"),
        ({"a": {"zzz": 4}}, "eval.sets.a.zzz: unknown key; keys of eval.sets.a: data, kwargs, max_turns, num_tasks"),
        ({"a": {"num_tasks": 0}}, "eval.sets.a.num_tasks must be an integer > 0"),
        ({"a": {"temperature": 0}}, "eval.sets.a.temperature must be a number > 0"),
    ],
)
def test_a_careless_set_is_refused_with_what_to_write(sets: Any, said: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        load(with_sets(sets))
    [problem] = refused.value.problems
    assert said in problem


def test_held_out_rows_that_no_set_plays_are_refused() -> None:
    with pytest.raises(InvalidConfig) as refused:
        load(with_sets({"gsm8k": {"data": "GSM8K"}, "sums": {"target": "Countdown-v0"}}, eval_data="AIME-2025"))
    [problem] = refused.value.problems
    assert "env.eval_data=AIME-2025 is in none of eval.sets (gsm8k, sums)" in problem
    assert "eval.sets.NAME.data=AIME-2025" in problem and "leave it out" in problem
    load(with_sets({"gsm8k": {"data": "GSM8K"}, "own": {}}, eval_data="AIME-2025"))
