"""Runs in the interpreter that has the `verifiers` package: loads an environment, plays its rollouts, scores them.

Started as a file. Uses JSON lines over its standard input and output (see line_process.py). Imports nothing of agentrl.
Requests: load {env_id, args, paths} -> {train, eval} rows; rollout {split, index, base_url, api_key, model, sampling}.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import sys
import threading
import traceback
from contextvars import ContextVar
from typing import Any

MODELS_DOING = ("EmptyModelResponseError", "ToolParseError")
"""Errors of a rollout that the model caused. The rollout ends there, and is scored."""

_rubric_errors: ContextVar[list[str]] = ContextVar("rubric_errors")


class Refused(Exception):
    """This environment cannot be adapted. The text says why."""


def load(env_id: str, args: dict[str, Any], paths: list[str]) -> Any:
    """Load an environment and watch its reward functions: the package counts their failures as a reward of 0."""
    sys.path[:0] = paths
    import verifiers as vf

    if not hasattr(vf, "load_environment") or not _has_clients():
        raise Refused("this release of verifiers has no environments with `rollout`: install verifiers 0.1.10 to 0.3.1")
    env = vf.load_environment(env_id, **args)
    if not hasattr(env, "rollout") or not hasattr(env, "get_dataset"):
        raise Refused(f"{type(env).__name__} has no rollout of a single agent")
    if env.rubric.has_group_rewards:
        raise Refused(f"the rubric of {env_id} scores groups of rollouts together; here each is scored alone")
    for rubric in _rubrics(env.rubric):
        rubric.funcs[:] = [_watched(func) for func in rubric.funcs]
    return env


def _has_clients() -> bool:
    try:
        import verifiers.clients.openai_chat_completions_client  # noqa: F401
    except ImportError:
        return False
    return True


def _rubrics(rubric: Any) -> list[Any]:
    parts = getattr(rubric, "rubrics", None)
    return [rubric] if parts is None else [leaf for part in parts for leaf in _rubrics(part)]


def _watched(func: Any) -> Any:
    """A function that records the failures of `func` for the rollout that it scores."""

    @functools.wraps(func)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            score = func(*args, **kwargs)
            return await score if inspect.isawaitable(score) else score
        except Exception as error:
            _rubric_errors.get().append(f"{getattr(func, '__name__', func)}: {type(error).__name__}: {error}")
            raise

    return call


class Worker:
    """The loaded environment and its rows."""

    def __init__(self) -> None:
        self._env: Any = None
        self._rows: dict[str, Any] = {}

    async def answer(self, asked: dict[str, Any]) -> Any:
        """Answer one request. Raises any error."""
        kind = asked["ask"]
        if kind == "load":
            # In the main thread, because environments set signal handlers.
            self._env = load(asked["env_id"], asked["args"], asked["paths"])
            self._rows = {"train": _rows(self._env.get_dataset), "eval": _rows(self._env.get_eval_dataset)}
            return {split: [_shown_part(row) for row in rows] for split, rows in self._rows.items()}
        return await self._rollout(asked)

    async def _rollout(self, asked: dict[str, Any]) -> dict[str, Any]:
        from openai import AsyncOpenAI
        from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient

        failures: list[str] = []
        _rubric_errors.set(failures)
        row = dict(self._rows[asked["split"]][asked["index"]])
        async with AsyncOpenAI(
            base_url=asked["base_url"], api_key=asked["api_key"], max_retries=0, timeout=None
        ) as http:
            client = OpenAIChatCompletionsClient(http)
            state = await self._env.rollout(row, client, asked["model"], asked["sampling"])
            await self._env.rubric.score_rollout(state)
        if hasattr(self._env.rubric, "cleanup"):
            await self._env.rubric.cleanup(state)
        error = state.get("error")
        is_models = error is None or type(error).__name__ in MODELS_DOING
        return {
            "reward": state.get("reward"),
            "metrics": {name: float(value) for name, value in (state.get("metrics") or {}).items()},
            "stop_condition": state.get("stop_condition"),
            "error": None if is_models else f"{type(error).__name__}: {error}",
            "rubric_errors": failures,
        }


def _rows(get: Any) -> Any:
    """A split's rows. Empty if the environment has no such split."""
    try:
        return get()
    except ValueError:
        return []


def _shown_part(row: dict[str, Any]) -> dict[str, Any]:
    """The part of a row that is shown to people."""
    prompt = row.get("prompt") or row.get("question") or ""
    if isinstance(prompt, list):
        prompt = "\n".join(str(message.get("content")) for message in prompt if isinstance(message, dict))
    answer = row.get("answer")
    return {"prompt": str(prompt), "answer": None if answer in (None, "") else str(answer)}


async def serve(out: Any) -> None:
    """Answer requests concurrently until the input ends."""
    worker, loop = Worker(), asyncio.get_running_loop()
    running: dict[int, asyncio.Task[None]] = {}
    lines: asyncio.Queue[Any] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(lines.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(lines.put_nowait, None)

    async def reply(asked: dict[str, Any]) -> None:
        try:
            said = {"id": asked["id"], "answer": await worker.answer(asked)}
        except Refused as error:
            said = {"id": asked["id"], "error": f"cannot be adapted: {error}"}
        except Exception as error:
            traceback.print_exc()
            said = {"id": asked["id"], "error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(said).encode() + b"\n")
        out.flush()

    threading.Thread(target=read, daemon=True).start()
    while (asked := await lines.get()) is not None:
        if "cancel" in asked:
            if task := running.get(asked["cancel"]):
                task.cancel()
            continue
        task = running[asked["id"]] = asyncio.create_task(reply(asked))
        task.add_done_callback(functools.partial(_forget, running, asked["id"]))
    for task in list(running.values()):
        task.cancel()


def _forget(running: dict[int, asyncio.Task[None]], number: int, _: object) -> None:
    running.pop(number, None)


if __name__ == "__main__":
    sys.path.pop(0)  # so that nothing is imported from this file's folder
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that the environment's output is not mistaken for an answer
    asyncio.run(serve(answers))
