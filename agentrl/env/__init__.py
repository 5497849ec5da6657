"""Environments: the classes that users write, and how one is found, made and driven. Exports all of it.

    base.py, tool_env.py, agent_env.py  the classes to derive from
    attribution.py, returned.py  whose failure it is, and checks of what methods return; places.py finds the line
    driver.py    one episode: start, turns, score, close
    scoring.py   the rewards of one episode, and of a whole group
    registry.py  finds and makes environments; entry_points.py finds those of other packages
    shared.py    resources that all episodes of a process share
    canary.py    episodes with a known outcome

May import: `agentrl.types`, `agentrl.errors`, `agentrl.supervision`, `agentrl.tools`, `sandbox.client`. Start reading
in `base.py`, then `tool_env.py`; `driver.py` plays an episode, `registry.py` finds a class.
"""

from agentrl.env.attribution import attributed
from agentrl.env.base import STEP_REWARD, Action, Env, Episode, Split, StepResult
from agentrl.env.driver import (
    Dialogue,
    Speaker,
    add_counts,
    advance,
    close,
    play_script,
    start,
    uninterrupted_close,
)
from agentrl.env.registry import EnvSpec, WrapEnv, load_env_class, make, register, spec, specs
from agentrl.env.returned import checked_script, rows_of
from agentrl.env.scoring import group_scored, scored
from agentrl.env.shared import opened
from agentrl.env.tool_env import ToolEnv

__all__ = [
    "STEP_REWARD",
    "Action",
    "Dialogue",
    "Env",
    "EnvSpec",
    "Episode",
    "Speaker",
    "Split",
    "StepResult",
    "ToolEnv",
    "WrapEnv",
    "add_counts",
    "advance",
    "attributed",
    "checked_script",
    "close",
    "group_scored",
    "load_env_class",
    "make",
    "opened",
    "play_script",
    "register",
    "rows_of",
    "scored",
    "spec",
    "specs",
    "start",
    "uninterrupted_close",
]
