"""The environments of a run, by held-out set: those that are the same are loaded and opened once.

Independent of who plays in them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.config import Config, EnvConfig
from agentrl.data.source import held_out_tasks
from agentrl.env import Env, WrapEnv, load_env_class, opened
from agentrl.rollouts.group import GroupPlayer, MakeRunner, ModelT
from agentrl.rollouts.settings import settings_of
from agentrl.types import Task
from agentrl.wrappers import load_wrappers

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

TRAINING = ""
"""Name of the training environment. Without `eval.sets`, held-out tasks are played in it too."""
MakeEnv = Callable[[], Env]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetEnv:
    """The environment of training, or of one held-out set.

    SetEnv(config=config, env_class=Capitals, wrappers=())
    """

    config: Config  # as the set sees it
    env_class: type[Env]
    wrappers: tuple[WrapEnv, ...]

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for environments that are the same."""
        return _identity(self.config.env)


def load_envs(config: Config) -> dict[str, SetEnv]:
    """The environment of training under TRAINING, and that of each of `eval.sets` under its name.

    Raises ConfigError.

        envs = load_envs(config)
        envs["aime25"].env_class
    """
    loaded: dict[str, SetEnv] = {}
    for name, seen in {TRAINING: config, **config.eval_sets}.items():
        env = seen.env
        same = [one for one in loaded.values() if one.identity == _identity(env)]
        env_class = same[0].env_class if same else load_env_class(env.target, env.kwargs)
        key = f"eval.sets.{name}.wrappers" if name else "env.wrappers"
        wrappers = same[0].wrappers if same else load_wrappers(env.wrappers, key=key)
        loaded[name] = SetEnv(config=seen, env_class=env_class, wrappers=wrappers)
    return loaded


def tasks_of_set(name: str, env: SetEnv) -> list[Task]:
    """The tasks that are measured of a held-out set. Raises ConfigError, EnvError.

    tasks_of_set("aime25", load_envs(config)["aime25"])
    """
    key = f"eval.sets.{name}.data" if name else "env.eval_data"
    return held_out_tasks(env.env_class, env.config.env, num_tasks=env.config.eval.num_tasks, key=key)


@asynccontextmanager
async def opened_envs(
    envs: Mapping[str, SetEnv], *, sandbox: SandboxClient | None = None
) -> AsyncIterator[dict[str, MakeEnv]]:
    """Open the shared resources of all; yields what makes an environment of each for one episode. Raises as `opened`.

    async with opened_envs(load_envs(config), sandbox=sandbox) as make_envs:
        env = make_envs["aime25"]()
    """
    async with AsyncExitStack() as stack:
        found: dict[str, MakeEnv] = {}
        for name, env in envs.items():
            same = [found[other] for other in found if envs[other].identity == env.identity]
            if same:
                found[name] = same[0]
            else:
                opening = opened(env.env_class, sandbox=sandbox, wrappers=env.wrappers)
                found[name] = await stack.enter_async_context(opening)
        yield found


def players_of(
    envs: Mapping[str, SetEnv], make_envs: Mapping[str, MakeEnv], runners: MakeRunner[ModelT]
) -> dict[str, GroupPlayer[ModelT]]:
    """Who plays in each.

    players = players_of(envs, make_envs, TokenRunners(tokenizer))
    group = await players["aime25"].play_group(engine, 0, task, kind="eval")
    """
    return {
        name: GroupPlayer(make_envs[name], settings_of(env.config), runners, name=name) for name, env in envs.items()
    }


def _identity(env: EnvConfig) -> tuple[Any, ...]:
    return env.target, env.kwargs, env.wrappers
