"""Checks what an environment's methods return. An error says what is wrong, in which file and line, and what to write.

Converts what has one meaning: a tuple of messages, a reward that is an int. Independent of how an episode is driven.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, get_args

import msgspec

from agentrl.env import places
from agentrl.env.attribution import MESSAGE, TASK, attributed
from agentrl.env.base import STEP_REWARD, Env, Episode, Split, StepResult
from agentrl.errors import EnvError
from agentrl.types import Message, Role, Task

RESET_RETURNS = "`return [user(task.prompt)], {}`"
STEP_RETURNS = "`return StepResult([user(text)], reward=0.0, terminated=False, truncated=False, info={})`"
SCORE_RETURNS = '`return {"correct": 1.0}`'
GROUP_RETURNS = '`return [{"brief": 1.0} for episode in episodes]`'
_ROLES = get_args(Role)
_MAX_SHOWN = 60
_Place = Callable[[], str]
"""`file:line`, found only for an error: it reads the source, and every step is checked."""


def rows_of(env_class: type[Env], split: Split, *, data: str | None = None, seed: int | None = None) -> Iterator[Task]:
    """`env_class.tasks(split, ...)`, each row checked. Lazy: a row is made when it is asked for.

    Raises ConfigError as `tasks` does; EnvError when it raises anything else, or yields what is not a Task.

    Example:
        first = next(rows_of(Capitals, "test"))
    """
    what = f"{env_class.__name__}.tasks"
    place = partial(places.defined_at, env_class.tasks)
    if inspect.isfunction(inspect.getattr_static(env_class, "tasks")):
        raise EnvError(f"{what} is not a classmethod: write `@classmethod` above it{places.in_brackets(place())}")
    options = {"data": data} if seed is None else {"data": data, "seed": seed}
    with attributed(what, method="tasks", at=env_class.tasks):
        found: Any = env_class.tasks(split, **options)
    if inspect.isawaitable(found):
        if inspect.iscoroutine(found):
            found.close()
        raise EnvError(f"{what} is `async`: write `def tasks`, without async{places.in_brackets(place())}")
    if isinstance(found, str | Mapping) or not hasattr(found, "__iter__"):
        raise _wrong(what, found, f"return a list of tasks, or yield them: {TASK}", place)
    rows = iter(found)

    def reached() -> str:
        frame = getattr(rows, "gi_frame", None)
        return (places.runs_in(frame) if frame is not None else "") or place()

    while True:
        with attributed(what, method="tasks", at=env_class.tasks):
            try:
                row = next(rows)
            except StopIteration:
                return
        yield _checked_task(row, what, reached)


def _checked_task(row: Any, what: str, place: _Place) -> Task:
    if not isinstance(row, Task):
        raise _wrong(what, row, f"a row is a {TASK}", place, verb="gave")
    for name, value, kinds, write in (
        ("id", row.id, str, f"id={str(row.id)!r}"),
        ("prompt", row.prompt, str, "prompt=str(...)"),
        ("answer", row.answer, str | None, f"answer={str(row.answer)!r}"),
        ("metadata", row.metadata, Mapping, "metadata={...}"),
    ):
        if not isinstance(value, kinds):
            raise EnvError(
                f"{what}: the {name} of task {_shown(row.id)} is {_described(value)}: write {write}"
                f"{places.in_brackets(place())}"
            )
    try:
        msgspec.json.encode(row)
    except (TypeError, ValueError) as error:
        raise EnvError(
            f"{what}: task {_shown(row.id)} cannot be saved with its episodes: {error}. Hold text, numbers, lists and "
            f"dicts in its metadata{places.in_brackets(place())}"
        ) from None
    return row


def checked_opening(env: Env, returned: Any, task: Task) -> list[Message]:
    """The first messages of what `reset` returned. Raises EnvError."""
    inner = env.unwrapped
    what, place = f"{type(inner).__name__}.reset", partial(places.defined_at, type(inner).reset)
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], Mapping)
    if not is_pair or (isinstance(returned[0], Mapping)):
        raise _wrong(what, returned, f"write {RESET_RETURNS}", place)
    messages = _checked_messages(returned[0], what, place, RESET_RETURNS)
    if not messages:
        raise EnvError(
            f"{what} of task {task.id} returned no message: write {RESET_RETURNS}{places.in_brackets(place())}"
        )
    return messages


def checked_step(env: Env, returned: Any) -> StepResult:
    """What `step` returned as a StepResult. Raises EnvError."""
    inner = env.unwrapped
    what, place = f"{type(inner).__name__}.step", partial(places.defined_at, type(inner).step)
    if not isinstance(returned, tuple | list) or len(returned) != 5:
        raise _wrong(what, returned, f"write {STEP_RETURNS}", place)
    observation, reward, terminated, truncated, info = returned
    messages = _checked_messages(observation, what, place, STEP_RETURNS)
    if not isinstance(reward, Real):
        raise _wrong(f"{what}: its reward", reward, "return a number", place, verb="is")
    if not math.isfinite(reward):
        raise EnvError(f"{what} returned reward {reward}: it must be finite{places.in_brackets(place())}")
    if not isinstance(info, Mapping):
        raise _wrong(f"{what}: its info", info, "return a dict, such as {}", place, verb="is")
    if not (terminated or truncated or messages):
        raise EnvError(
            f"{what} returned no observation, but did not end the episode: return a message, or terminated=True"
            f"{places.in_brackets(place())}"
        )
    return StepResult(messages, float(reward), bool(terminated), bool(truncated), dict(info))


def checked_rewards(env: Env, returned: Any) -> dict[str, float]:
    """The named rewards that `score` returned. Raises EnvError."""
    inner = env.unwrapped
    what, place = f"{type(inner).__name__}.score", partial(places.defined_at, type(inner).score)
    rewards = _checked_named(env, returned, what, place, SCORE_RETURNS)
    missing = sorted(env.reward_weights.keys() - rewards.keys() - {STEP_REWARD})
    if missing and type(inner).score is not Env.score and not env.scores_groups:
        raise EnvError(
            f"{what} did not return {missing}, which reward_weights names: return each of {sorted(env.reward_weights)} "
            f"for every episode{places.in_brackets(place())}"
        )
    return rewards


def checked_group_rewards(env: Env, returned: Any, episodes: Sequence[Episode]) -> list[dict[str, float]]:
    """The named rewards that `score_group` returned: of each episode, those that `score` did not give. [G]

    Raises EnvError.
    """
    inner = env.unwrapped
    what, place = f"{type(inner).__name__}.score_group", partial(places.defined_at, type(inner).score_group)
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        raise _wrong(what, returned, f"return a list of named rewards: {GROUP_RETURNS}", place)
    if len(returned) != len(episodes):
        raise EnvError(
            f"{what} returned {len(returned)} rewards for {len(episodes)} episodes: return one dict for each episode, "
            f"in order{places.in_brackets(place())}"
        )
    return [
        _checked_member(env, rewards, episode, f"{what} (episode {number} of {len(episodes)})", place)
        for number, (rewards, episode) in enumerate(zip(returned, episodes, strict=True), 1)
    ]


def _checked_member(env: Env, returned: Any, episode: Episode, what: str, place: _Place) -> dict[str, float]:
    rewards = _checked_named(env, returned, what, place, GROUP_RETURNS)
    if twice := sorted(rewards.keys() & episode.rewards.keys()):
        raise EnvError(
            f"{what} has {twice}, which `score` gave already: give each reward a name of its own"
            f"{places.in_brackets(place())}"
        )
    if missing := sorted(env.reward_weights.keys() - rewards.keys() - episode.rewards.keys() - {STEP_REWARD}):
        raise EnvError(
            f"{what} lacks {missing}, which reward_weights names: return it from score or score_group for every episode"
            f"{places.in_brackets(place())}"
        )
    return rewards


def _checked_named(env: Env, returned: Any, what: str, place: _Place, write: str) -> dict[str, float]:
    """Named rewards, each with a weight and finite. Raises EnvError."""
    known = sorted(env.reward_weights)
    if not isinstance(returned, Mapping):
        raise _wrong(what, returned, f"return a dict of named rewards: {write}", place)
    for key, value in returned.items():
        if key not in env.reward_weights:
            raise EnvError(
                f"{what} returned {key!r}, which reward_weights does not name: {known}. Write in the class "
                f"`reward_weights = {{{', '.join(f'{name!r}: 1.0' for name in [*known, key])}}}`"
                f"{places.in_brackets(place())}"
            )
        if not isinstance(value, Real):
            raise _wrong(f"{what}: the reward {key!r}", value, "return a number", place, verb="is")
        if not math.isfinite(value):
            raise EnvError(f"{what} returned {key}={value}: it must be finite{places.in_brackets(place())}")
    return {key: float(value) for key, value in returned.items()}


def checked_script(env_class: type[Env], task: Task, **options: Any) -> tuple[Message, ...] | None:
    """The messages of `demonstrations`, which gets `options` (skill, seed); None where there are none.

    Raises EnvError.
    """
    what, place = f"{env_class.__name__}.demonstrations", partial(places.defined_at, env_class.demonstrations)
    with attributed(f"{what} of task {task.id}", method="demonstrations", at=env_class.demonstrations):
        script: Any = env_class.demonstrations(task, **options)
    if script is None:
        return None
    return tuple(_checked_messages(script, what, place, '`[Message(role="assistant", content="text")]`'))


def _checked_messages(messages: Any, what: str, place: _Place, write: str) -> list[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise _wrong(f"{what}: its messages", messages, f"write {write}", place, verb="are")
    for message in messages:
        if not isinstance(message, Message):
            raise _wrong(what, message, f"a message is {MESSAGE}", place, verb="gave")
        if not isinstance(message.content, str):
            raise _wrong(f"{what}: a message's content", message.content, "write text: str(...)", place, verb="is")
        if message.role not in _ROLES:
            raise _wrong(f"{what}: a message's role", message.role, f"write one of {list(_ROLES)}", place, verb="is")
    return list(messages)


def _wrong(what: str, value: Any, write: str, place: _Place, *, verb: str = "returned") -> EnvError:
    return EnvError(f"{what} {verb} {_described(value)}: {write}{places.in_brackets(place())}")


def _described(value: Any) -> str:
    if value is None:
        return "None"
    return f"{_shown(value)} ({type(value).__name__})"


def _shown(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = "a value without a repr"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
