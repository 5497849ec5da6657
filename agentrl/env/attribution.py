"""Attributes a failure of an environment's code once: to its method, file and line, with advice where it is known."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from agentrl.env import places
from agentrl.errors import AgentRLError, EnvError, SandboxError

SIGNATURES = {
    "tasks": "@classmethod def tasks(cls, split, *, data=None, seed=0)",
    "reset": "async def reset(self, *, task, seed=None)",
    "step": "async def step(self, action)",
    "score": "async def score(self, episode)",
    "score_group": "async def score_group(self, episodes)",
    "demonstrations": "@classmethod def demonstrations(cls, task, *, skill=1.0, seed=0)",
    "phrase": "@classmethod def phrase(cls, answer)",
    "open_shared": "@classmethod @asynccontextmanager async def open_shared(cls), with one `yield`",
}
"""How each method is defined, for advice."""
MAX_CHARACTERS = 2000
"""Of the text of an exception."""
TASK = '`Task(id="a", prompt="What is 2 + 2?", answer="4")`'
MESSAGE = '`user("text")` or `Message(role="user", content="text")`'
_FIELDS_BY_NAME = re.compile(r"(Task|Message|ToolCall|Action)\.__init__\(\) takes 1 positional argument")


@contextlib.contextmanager
def attributed(
    what: str,
    *,
    passing: type[Exception] | tuple[type[Exception], ...] = (),
    at: Callable[..., Any] | None = None,
    method: str = "",
    error_type: type[EnvError] = EnvError,
) -> Iterator[None]:
    """Turn failures inside into SandboxError if the sandbox service failed, else into `error_type` with file and line.

    Errors that are already attributed, cancellation, and the types in `passing` pass unchanged.

    Args:
        at: what was called; its definition is named where the exception passed no line of the user's.
        method: its name in Env, for advice on its signature.

        with attributed("MyEnv.step"):
            result = await env.step(action)
    """
    try:
        yield
    except AgentRLError:
        raise
    except Exception as error:
        if passing and isinstance(error, passing):
            raise
        kind = SandboxError if _is_sandbox_failure(error) else error_type
        place = places.in_brackets(places.raised_at(error) or places.defined_at(at))
        text = str(error) if len(str(error)) <= MAX_CHARACTERS else f"{str(error)[:MAX_CHARACTERS]}..."
        raise kind(f"{what}: {type(error).__name__}: {text}{advice(error, method)}{place}") from error
    except SystemExit as error:  # it would end the whole process
        place = places.in_brackets(places.raised_at(error))
        raise error_type(f"{what} called sys.exit({error.code!r}): raise an exception instead{place}") from error


def _is_sandbox_failure(error: Exception) -> bool:
    from sandbox.client import SandboxUnavailable

    return isinstance(error, SandboxUnavailable)


def advice(error: BaseException, method: str) -> str:
    """What to write instead, for exceptions that come of a mistake in using agentrl; else empty."""
    text = str(error)
    if isinstance(error, TypeError) and (found := _FIELDS_BY_NAME.search(text)):
        written = {"Task": TASK, "Message": MESSAGE}.get(found[1], f"{found[1]}(name=value, ...)")
        return f"; {found[1]}'s fields are given by name: {written}"
    if isinstance(error, TypeError) and not places.raised_at(error) and method in SIGNATURES:
        return f"; write `{SIGNATURES[method]}`"
    return ""
