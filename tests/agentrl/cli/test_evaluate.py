"""What `agentrl eval` is asked to do."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.cli.evaluate import Request
from agentrl.config import Config
from agentrl.errors import ConfigError

CONFIG = Config.model_validate({"name": "x", "env": {"target": "envs.modmath:ModMath"}, "model": {"path": "unused"}})
URL = "http://127.0.0.1:9/v1"


def request(**options: Any) -> Request:
    nothing = dict.fromkeys(("model", "data", "target", "tokenizer", "samples", "limit"))
    return Request.from_options(CONFIG, **{**nothing, **options})


def test_the_key_is_read_from_the_variable_that_is_named() -> None:
    environ = {"OPENAI_API_KEY": "one", "MINE": "two"}
    assert request(model=URL, served_model="m", environ=environ).api_key == "one"
    named = request(model=URL, served_model="m", api_key_env="MINE", environ=environ)
    assert (named.api_key, named.api_key_env, named.served_model) == ("two", "MINE", "m")
    assert request(model=URL, served_model="m", api_key_env="NONE", environ=environ).api_key is None


@pytest.mark.parametrize(
    ("options", "mend"),
    [
        ({"served_model": "m"}, "--model https://"),
        ({"model": "folder", "served_model": "m"}, "--model https://"),
        ({"model": URL, "served_model": "m", "tokenizer": "folder"}, "leave out --tokenizer"),
        ({"model": URL, "api_key_env": "MINE"}, "--served-model"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], mend: str) -> None:
    with pytest.raises(ConfigError, match=mend):
        request(**options)
