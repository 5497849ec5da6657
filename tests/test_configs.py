"""The shipped configs load, and everything they name exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import Config, load
from agentrl.env import load_env_class
from envs.datasets import NAMED_SETS

SHIPPED = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.fixture(params=SHIPPED, ids=lambda path: path.stem)
def config(request: pytest.FixtureRequest) -> Config:
    return load(request.param)


def test_there_are_configs_for_a_laptop_one_gpu_and_eight() -> None:
    assert {"quickstart", "aime_1gpu", "aime_8gpu"} <= {path.stem for path in SHIPPED}


def test_environment_and_rows_exist(config: Config) -> None:
    env_class = load_env_class(config.env.target)
    assert env_class.tools
    for split, data in (("train", config.env.train_data), ("test", config.env.eval_data)):
        assert data is None or split in NAMED_SETS[data].files
        if data is None:
            assert next(iter(env_class.tasks(split))).answer  # type: ignore[arg-type]


def test_an_episode_has_room_for_every_turn_s_tool_output(config: Config) -> None:
    rollout = config.rollout
    turns = config.env.max_turns or load_env_class(config.env.target).max_turns
    assert rollout.max_turn_tokens + (turns - 1) * rollout.tool_output_tokens < rollout.max_context


def test_the_control_arm_is_one_override_away() -> None:
    config = load(SHIPPED[0].with_name("aime_1gpu.yaml"), ["env.target=Aime-v0"])
    assert not load_env_class(config.env.target).tools
