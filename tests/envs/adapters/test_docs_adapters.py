"""The configs and the code of docs/adapters.md."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl import config
from agentrl.env import Env, load_env_class
from agentrl.env.entry_points import adapters
from envs.adapters.to_gymnasium import TextEnv

DOCS = Path(__file__).parents[3] / "docs" / "adapters.md"
CONFIGS = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
PROGRAMS = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)


def test_every_adapter_has_a_config() -> None:
    assert {re.search(r"target: (\w+):", text).group(1) for text in CONFIGS} == set(adapters())  # type: ignore[union-attr]


@pytest.mark.parametrize("text", CONFIGS)
def test_a_config_loads_and_its_options_are_the_adapters(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"name: run\n{text}model: {{path: some-model}}\n")
    env = config.load(path).env
    scheme, _, rest = env.target.partition(":")
    signature = inspect.signature(adapters()[scheme].load())
    signature.bind(rest, **env.kwargs)
    if scheme == "gymnasium":
        assert issubclass(load_env_class(env.target, env.kwargs), Env)


def test_the_programs_run() -> None:
    said: dict[str, Any] = {}
    for program in PROGRAMS:
        exec(program, said)
    assert issubclass(said["CartPole"], Env)
    assert isinstance(said["env"], TextEnv)
    assert (said["reward"], said["terminated"]) in ((0.0, True), (1.0, True))
