"""The process in which `check_target` runs the checks: writes what it finds to standard output, one JSON line each.

Run as `python -m agentrl.check.worker REQUEST`. What the environment prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from agentrl.check.check_env import check_env
from agentrl.check.limited import overdue
from agentrl.check.report import BLOCKED, Check, News, Request, shown
from agentrl.env import attributed, load_env_class, places
from agentrl.errors import AgentRLError, ConfigError
from sandbox.client import SandboxClient, SandboxUnavailable

TICK_S = 0.25
GRACE_S = 1.5
"""How long a call may clean up after its deadline."""
LOADING_S = 30.0
"""Deadline for importing the environment: libraries that it imports may be large."""


class _Worker:
    def __init__(self, request: Request) -> None:
        self._request = request
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._current = "loading"
        self._limit_s = max(LOADING_S, request.timeout_s)
        self._ticked = time.monotonic()

    def say(self, news: News) -> None:
        with self._lock:
            self._out.write(msgspec.json.encode(news) + b"\n")

    def begin(self, name: str) -> None:
        self._current = name
        self.say(News(begin=name))

    def run(self) -> None:
        threading.Thread(target=self._watch, args=(threading.get_ident(),), daemon=True).start()
        self.begin(self._current)
        try:
            sys.path[:] = self._request.path
            env_class = load_env_class(self._request.target, self._request.kwargs)
            self._limit_s = self._request.timeout_s
            asyncio.run(self._check(env_class))
        except (ConfigError, SandboxUnavailable) as error:
            self.say(News(cannot_start=shown(str(error))))
        except AgentRLError as error:
            detail = shown(" ".join(str(error).split()))
            self.say(News(check=Check(name=self._current, detail=detail, level="FAIL")))
            self.say(News(ended=self._request.target))

    async def _check(self, env_class: Any) -> None:
        request = self._request
        with self._ticking():
            with attributed(env_class.__name__, passing=SandboxUnavailable):
                self.begin("starting a sandbox")
                async with SandboxClient.embedded() as sandbox:
                    await check_env(
                        env_class,
                        data=request.data,
                        sandbox=sandbox,
                        limit=request.limit,
                        tokenizer=request.tokenizer,
                        timeout_s=request.timeout_s,
                        on_begin=self.begin,
                        on_check=lambda check: self.say(News(check=check)),
                        progress=lambda done, total: self.say(News(progress=(done, total))),
                    )
            self.say(News(ended=env_class.__name__))

    @contextmanager
    def _ticking(self) -> Iterator[None]:
        """Note the time every TICK_S, as long as nothing blocks the event loop."""
        loop = asyncio.get_running_loop()

        def tick() -> None:
            self._ticked = time.monotonic()
            self._timer = loop.call_later(TICK_S, tick)

        tick()
        try:
            yield
        finally:
            self._timer.cancel()

    def _watch(self, main_thread: int) -> None:
        """End the process when the main thread does not return. A thread: it runs also while the event loop is
        blocked."""
        while True:
            time.sleep(TICK_S)
            self.say(News())
            if what := overdue(GRACE_S):
                detail = (
                    f"{what} did not return after its deadline, and ignores its cancellation: let CancelledError pass"
                )
                self.say(News(check=Check(name=self._current, detail=detail, level="FAIL")))
                os._exit(BLOCKED)
            if time.monotonic() - self._ticked > self._limit_s:
                place = places.runs_at(main_thread) or "the environment's code"
                detail = f"importing the file did not end within {self._limit_s:g} s; it is at {place}"
                if self._current != "loading":
                    detail = (
                        f"{place} blocks the process: it did not return within {self._limit_s:g} s. Write a tool that "
                        "waits as `def` without `async`, then it runs in a thread; elsewhere, `await` what waits. If "
                        "it is slow and does not hang: --timeout SECONDS"
                    )
                self.say(News(check=Check(name=self._current, detail=detail, level="FAIL")))
                os._exit(BLOCKED)


if __name__ == "__main__":
    for name in ("agentrl", "asyncio"):  # the report has it, in one line
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    _Worker(msgspec.json.decode(sys.argv[1], type=Request)).run()
