"""A Gymnasium environment as an Env: describes its states in words and reads its actions from the model's messages.

Independent of tokens. An action that cannot be read is an observation; an error of the game is EnvError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from agentrl.env import Action, Env, Split, StepResult
from agentrl.errors import ConfigError, MissingDependencyError
from agentrl.types import Message, Task, user
from envs.adapters.seed_tasks import seed_tasks
from envs.adapters.toy_text import GAMES, Describe, Words

if TYPE_CHECKING:
    import gymnasium

DEFAULT_MAX_TURNS = 64
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Game:
    """How one environment is made and described."""

    make: Callable[[], gymnasium.Env[Any, Any]]
    rules: str
    action_names: tuple[str, ...]
    describe: Callable[[gymnasium.Env[Any, Any], Any], str]
    in_thread: bool


class GymnasiumEnv(Env):
    """One episode of a Gymnasium environment. `from_gymnasium` makes the classes to use.

    Rewards are those of its steps; a bad action costs a turn, and is counted in `info["bad_actions"]`.
    """

    reward_weights: ClassVar[dict[str, float]] = {}
    num_test_tasks: ClassVar[int]
    game: ClassVar[_Game]

    def __init__(self) -> None:
        self._env: gymnasium.Env[Any, Any] | None = None
        # Some games are bound to the thread that made them. The toy games are not, and cost less than a thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gymnasium") if self.game.in_thread else None

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """A task is a seed of the game: endless for `train`, always the same `num_test_tasks` for `test`."""
        if data is not None:
            raise ConfigError(f"{cls.__name__} generates its tasks from seeds: remove the data file {data}")
        return seed_tasks(split, prompt=cls.game.rules, seed=seed, num_test_tasks=cls.num_test_tasks)

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Returns the rules and the first state. The task's seed determines it, so all its episodes start alike."""
        text = await self._do(lambda: self._begin(task.metadata["seed"]))
        return [user(f"{task.prompt}\n\n{text}")], {}

    async def step(self, action: Action) -> StepResult:
        """Play the action that the message names."""
        from envs.adapters.space_text import NoAction, read_action

        assert self._env is not None
        try:
            chosen = read_action(self._env.action_space, self.game.action_names, action.message.content)
        except NoAction as error:
            return StepResult([user(f"Error: {error}")], 0.0, False, False, {"bad_actions": 1})
        text, reward, terminated, truncated = await self._do(lambda: self._play(chosen))
        return StepResult([user(text)], reward, terminated, truncated, {"bad_actions": 0})

    async def close(self) -> None:
        """Close the game, and end its thread."""
        env, self._env = self._env, None
        if env is not None:
            await self._do(env.close)
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _begin(self, seed: int) -> str:
        self._env = self.game.make()
        observation, _ = self._env.reset(seed=seed)
        return self.game.describe(self._env, observation)

    def _play(self, chosen: Any) -> tuple[str, float, bool, bool]:
        assert self._env is not None
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        return self.game.describe(self._env, observation), float(reward), bool(terminated), bool(truncated)

    async def _do(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def from_gymnasium(
    env_id: str,
    *,
    rules: str | None = None,
    action_names: Sequence[str] = (),
    describe: Callable[[Any], str] | None = None,
    max_turns: int | None = None,
    num_test_tasks: int = 64,
    **kwargs: Any,
) -> type[GymnasiumEnv]:
    """Makes an Env class from a text or discrete Gymnasium environment.

    Its states are described by the first available of: `describe`; our words for the toy games; its own `ansi`
    picture; its numbers and texts as they are.

    Args:
        env_id: id of a registered environment (`module:ns/Name-v0` imports the module first).
        rules: first instructions for the model; None takes our words for the game, or the id.
        action_names: names of Discrete actions, in order; empty takes our words for the game, or numbers.
        describe: observation -> text.
        max_turns: None takes the environment's own step limit, or 64 where it has none.
        num_test_tasks: number of seeds in the test split.
        kwargs: passed to `gymnasium.make`.

    Raises:
        ConfigError: there is no such environment, or its observations or actions are not text or discrete.
        MissingDependencyError: gymnasium is not installed.

    Example:
        FrozenLake = from_gymnasium("FrozenLake-v1", is_slippery=False, max_turns=40)
    """
    make, bare = _maker(env_id, kwargs)
    try:
        words = GAMES.get(env_id.rpartition("-v")[0], Words(rules=f"You play {env_id}.", actions=()))
        game = _game(bare, make, words, rules=rules, action_names=action_names, describe=describe)
        limit = bare.spec.max_episode_steps if bare.spec is not None else None
    finally:
        bare.close()
    fields = {
        "__doc__": f"Gymnasium's {env_id}.",
        "__module__": __name__,
        "game": game,
        "max_turns": max_turns or limit or DEFAULT_MAX_TURNS,
        "num_test_tasks": num_test_tasks,
    }
    return type(env_id, (GymnasiumEnv,), fields)


def _maker(
    env_id: str, kwargs: dict[str, Any]
) -> tuple[Callable[[], gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]:
    """A function that makes the environment, in text mode if it has one; and the first environment made."""
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of_extra("gymnasium is not installed", "gymnasium") from error
    try:
        spec = gymnasium.spec(env_id)
        bare = gymnasium.make(env_id, **kwargs)
        if "render_mode" not in kwargs and "ansi" in bare.metadata.get("render_modes", ()):
            bare.close()
            kwargs = {**kwargs, "render_mode": "ansi"}
            bare = gymnasium.make(env_id, **kwargs)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigError(f"gymnasium.make({env_id!r}): {error}") from error
    return (lambda: gymnasium.make(spec, **kwargs)), bare


def _game(
    bare: gymnasium.Env[Any, Any],
    make: Callable[[], gymnasium.Env[Any, Any]],
    words: Words,
    *,
    rules: str | None,
    action_names: Sequence[str],
    describe: Callable[[Any], str] | None,
) -> _Game:
    from envs.adapters import space_text

    space_text.refuse_action(bare.action_space)
    names = space_text.action_names(bare.action_space, action_names or words.actions)
    as_text: Callable[[gymnasium.Env[Any, Any], Any], str]
    if describe is not None:
        as_text = lambda env, observation: describe(observation)  # noqa: E731
    elif words.describe is not None:
        as_text = _of_words(words.describe)
    elif bare.render_mode == "ansi":
        as_text = lambda env, observation: space_text.plain(str(env.render()))  # noqa: E731
    else:
        space_text.refuse_observation(bare.observation_space)
        as_text = lambda env, observation: space_text.describe(env.observation_space, observation)  # noqa: E731
    return _Game(
        make=make,
        rules=f"{rules or words.rules_of(bare.unwrapped)}\n{space_text.how_to_act(bare.action_space, names)}",
        action_names=names,
        describe=as_text,
        in_thread=not type(bare.unwrapped).__module__.startswith("gymnasium.envs.toy_text"),
    )


def _of_words(describe: Describe) -> Callable[[gymnasium.Env[Any, Any], Any], str]:
    return lambda env, observation: describe(env.unwrapped, observation)
