"""Train language models to use tools over many turns, asynchronously.

Exports the Python API (`agentrl.train`, docs/python-api.md) and what environments are written with
(`agentrl.make("AimePython-v0")`). Names are loaded at first use, so that `import agentrl` alone loads nothing. The
parts of a run are in the packages below.

May import: `sandbox.client` and `sandbox.protocol`; neither `envs` nor `trainer`. Start reading in
`examples/minimal_loop.py`, then `agentrl/types.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.api import Run, RunResult, check_env, evaluate, read_run, rollout, train
    from agentrl.env import Action, Env, Episode, StepResult, ToolEnv, make, opened, register, spec, specs
    from agentrl.report.observer import Observer, StepReport
    from agentrl.tools import ToolError, tool
    from agentrl.types import Message, Task, ToolCall, system, user
    from agentrl.wrappers import RewardScale, TimeLimit, ToolBudget, Wrapper

_PLACES = {
    "agentrl.api": ("Run", "RunResult", "check_env", "evaluate", "read_run", "rollout", "train"),
    "agentrl.env": (
        "Action",
        "Env",
        "Episode",
        "StepResult",
        "ToolEnv",
        "make",
        "opened",
        "register",
        "spec",
        "specs",
    ),
    "agentrl.report.observer": ("Observer", "StepReport"),
    "agentrl.tools": ("ToolError", "tool"),
    "agentrl.types": ("Message", "Task", "ToolCall", "system", "user"),
    "agentrl.wrappers": ("RewardScale", "TimeLimit", "ToolBudget", "Wrapper"),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "Action",
    "Env",
    "Episode",
    "Message",
    "Observer",
    "RewardScale",
    "Run",
    "RunResult",
    "StepReport",
    "StepResult",
    "Task",
    "TimeLimit",
    "ToolBudget",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "Wrapper",
    "check_env",
    "evaluate",
    "make",
    "opened",
    "read_run",
    "register",
    "rollout",
    "spec",
    "specs",
    "system",
    "tool",
    "train",
    "user",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
