"""What the arguments of an evaluation or a rollout ask for, and what is played with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from agentrl.api.playing import EVERYTHING, PlayOptions, Request, _by_tokens, _engine
from agentrl.config import Config, EngineConfig, ModelConfig
from agentrl.engine.launch_servers import start_phase
from agentrl.errors import ConfigError, EngineGone
from agentrl.report.observer import Observer
from agentrl.run_folder import RunFolder
from agentrl.supervision.place import LocalPlace
from agentrl.supervision.serving import serving
from agentrl.tokens.tokenizer import load_tokenizer
from agentrl.training.model_folder import check_model

CONFIG = Config.model_validate({"name": "x", "env": {"target": "envs.modmath:ModMath"}, "model": {"path": "unused"}})
URL = "http://127.0.0.1:9/v1"


def request(*, environ: Mapping[str, str] | None = None, **options: Any) -> Request:
    return Request.from_options(CONFIG, PlayOptions(**options), environ=environ or {})


def test_the_key_is_read_from_the_variable_that_is_named() -> None:
    environ = {"OPENAI_API_KEY": "one", "MINE": "two"}
    assert request(model=URL, served_model="m", environ=environ).api_key == "one"
    named = request(model=URL, served_model="m", api_key_env="MINE", environ=environ)
    assert (named.api_key, named.api_key_env, named.served_model) == ("two", "MINE", "m")
    assert request(model=URL, served_model="m", api_key_env="NONE", environ=environ).api_key is None


def test_a_model_can_be_the_name_of_a_run_and_is_then_what_the_run_exported(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"out_dir": str(tmp_path)})
    run = RunFolder.create(tmp_path, "mine", config=config)

    def model_of(model: str) -> str:
        return Request.from_options(config, PlayOptions(model=model), environ={}).config.model.path

    with pytest.raises(ConfigError, match="mine has exported no weights yet"):
        model_of("mine")
    for name in ("step_9", "step_10", "final"):
        (run.checkpoints / name).mkdir()
        for file in ("pytorch_model.bin", "tokenizer.json", "config.json"):
            (run.checkpoints / name / file).write_text("{}")
        assert model_of("mine") == model_of(str(run.path)) == str(run.checkpoints / name)
    with pytest.raises(ConfigError, match=r"mine is a run; its trained weights are in model.path=.*/checkpoints/final"):
        check_model(config.model_copy(update={"model": ModelConfig(path="mine")}))


def test_a_folder_beside_a_server_that_serves_its_own_model_is_refused() -> None:
    config = CONFIG.model_copy(update={"engine": EngineConfig(url="http://127.0.0.1:9")})
    with pytest.raises(ConfigError, match=r"engine\.url=null"):
        Request.from_options(config, PlayOptions(model="models/tiny"), environ={})
    assert start_phase(config.engine) == "connecting to http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"served_model": "m"}, "--model https://"),
        ({"model": "folder", "served_model": "m"}, "--model https://"),
        ({"model": URL, "served_model": "m", "tokenizer": "folder"}, "leave out --tokenizer"),
        ({"model": URL, "api_key_env": "MINE"}, "--served-model"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        request(**options)


def with_sets(**options: Any) -> Request:
    tree = CONFIG.model_dump() | {"eval": {"sets": {"a": {"num_tasks": 5}, "b": {"samples_per_task": 9}}}}
    return Request.from_options(
        Config.model_validate(tree), PlayOptions(model=URL, served_model="m", **options), environ={}
    )


def sizes(request: Request) -> dict[str, tuple[int, int]]:
    """Of each set that is played, tasks and samples."""
    settings = {name: env.config.eval for name, env in request.envs().items()}
    return {name: (one.num_tasks, one.samples_per_task) for name, one in settings.items()}


def test_the_sets_of_the_config_are_played_unless_the_options_name_other_rows() -> None:
    assert sizes(with_sets()) == {"a": (5, 4), "b": (64, 9)}
    assert sizes(with_sets(eval_set="b")) == {"b": (64, 9)}
    assert sizes(with_sets(samples=2, limit=3)) == {"a": (3, 2), "b": (3, 2)}
    assert sizes(with_sets(data="rows.jsonl")) == {"": (EVERYTHING, 4)}
    assert sizes(with_sets(target="envs.countdown:Countdown", limit=7)) == {"": (7, 4)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"eval_set": "c"}, r"'c' is not in the config's eval\.sets: a, b"),
        ({"eval_set": "a", "data": "rows.jsonl"}, "leave out --data and --env, or --set"),
        ({"eval_set": "a", "target": "x:Y"}, "leave out --data and --env, or --set"),
    ],
)
def test_a_set_that_cannot_be_meant_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_sets(**options)
    with pytest.raises(ConfigError, match="one held-out set, without a name"):
        request(model=URL, served_model="m", eval_set="a")


async def test_a_server_that_is_not_in_rl_mode_is_to_be_measured_through_its_chat_endpoint(tmp_path: Path) -> None:
    plain = FastAPI()
    plain.get("/v1/models")(lambda: {"data": [{"id": "some-model"}]})
    async with serving(plain, host="127.0.0.1", port=0) as url:
        with pytest.raises(ConfigError, match="--served-model NAME") as refused:
            async with _engine(request(model=url), tmp_path, Observer(), LocalPlace()):
                pass
    assert url in str(refused.value) and "agentrl engine" in str(refused.value)


async def test_the_configs_renderer_writes_the_prompts(
    tmp_path: Path, with_template: Callable[[str | None], str]
) -> None:
    folder = with_template("{{ raise_exception('this template cannot be trained with') }}")
    by_template = request(model=URL, tokenizer=folder)
    with pytest.raises(ConfigError, match="cannot be trained with"):
        load_tokenizer(by_template.config.model, folder)
    model = by_template.config.model.model_copy(update={"renderer": "raw"})
    raw = replace(by_template, config=by_template.config.model_copy(update={"model": model}))
    with pytest.raises(EngineGone):  # the tokenizer was loaded; nothing listens at the address
        async with _by_tokens(raw, {}, {}, tmp_path, Observer(), LocalPlace()):
            pass
