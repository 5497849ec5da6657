"""Checks `score_group` on episodes that were played alone. Independent of the other checks."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.env import Env, Episode, attributed, close, group_scored


async def group_detail(make_env: Callable[[], Env], episode: Episode) -> str:
    """Score `episode` as a group of one, and with its twin; each on an object that played nothing, then closed.

    Raises EnvError, with the line of the user's code.

    Example:
        detail = await group_detail(make_env, await play_script(make_env(), task, script))
    """
    for episodes in ([episode], [episode, episode]):
        env = make_env()
        inner = type(env.unwrapped)
        try:
            scored = await group_scored(env, episodes)
            with attributed(f"{inner.__name__}.close of an object that scored a group, without reset", at=inner.close):
                await env.close()
        finally:
            await close(env)
    added = {name: value for name, value in scored[0].rewards.items() if name not in episode.rewards}
    named = ", ".join(f"{name}={value:g}" for name, value in added.items()) or "no named reward"
    return f"two equal episodes score {named} each"
