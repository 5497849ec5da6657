"""Environments, in one place to import from: what a user writes, and how one is found, made and played.

Holds no code of its own: `base_env` and `tool_env` are the classes, `drive` plays an episode, `registry` finds a class.
"""

from agentrl.base_env import Env
from agentrl.drive import add_counts, advance, attributed, close, play_script, scored, start, uninterrupted_close
from agentrl.episode import STEP_REWARD, Action, Episode, Split, StepResult
from agentrl.providers import provide
from agentrl.registry import EnvSpec, WrapEnv, load_env_class, make, register, spec, specs
from agentrl.shared import opened
from agentrl.tool_env import ToolEnv

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
