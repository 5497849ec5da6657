"""Environments, in one place to import from: what a user writes, and how one is found, made and played.

Holds no code of its own: `base_env` and `tool_env` are the classes, `drive` plays an episode, `registry` finds a class.
"""

from agentrl.environments.base_env import Env
from agentrl.environments.drive import (
    add_counts,
    advance,
    attributed,
    close,
    play_script,
    scored,
    start,
    uninterrupted_close,
)
from agentrl.environments.episode import STEP_REWARD, Action, Episode, Split, StepResult
from agentrl.environments.providers import provide
from agentrl.environments.registry import EnvSpec, WrapEnv, load_env_class, make, register, spec, specs
from agentrl.environments.shared import opened
from agentrl.environments.tool_env import ToolEnv

__all__ = [
    "STEP_REWARD",
    "Action",
    "Env",
    "EnvSpec",
    "Episode",
    "Split",
    "StepResult",
    "ToolEnv",
    "WrapEnv",
    "add_counts",
    "advance",
    "attributed",
    "close",
    "load_env_class",
    "make",
    "opened",
    "play_script",
    "provide",
    "register",
    "scored",
    "spec",
    "specs",
    "start",
    "uninterrupted_close",
]
