"""Checks an environment in a process of its own, which is ended when the environment's code blocks it or hangs.

Independent of the console and of what is checked.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from agentrl.check.report import BLOCKED, TIMEOUT_S, Check, CheckReport, News, OnCheck, OnProgress, Request, ignore
from agentrl.errors import ConfigError
from agentrl.supervision.child import Child, child, module_command

START_S = 60.0
"""Deadline for the process to start; then it says something every quarter of a second."""
SILENT_S = 9.0
MAX_OUTPUT_LINES = 20


async def check_target(
    target: str,
    *,
    kwargs: Mapping[str, Any] | None = None,
    data: str | None = None,
    limit: int | None = None,
    tokenizer: str | None = None,
    timeout_s: float = TIMEOUT_S,
    on_begin: Callable[[str], None] = ignore,
    on_check: OnCheck = ignore,
    progress: OnProgress = ignore,
) -> CheckReport:
    """Check the class that a target names, as `check_env` does, with a sandbox of its own.

    Args:
        target: `module:Class`, `path/to/file.py:Class`, a registered id, or `SCHEME:REST` of an adapter.
        kwargs: constructor arguments.

    The other arguments are those of `check_env`. The process is gone when this returns, raises or is cancelled. Raises
    ConfigError where the target cannot be loaded or its rows cannot be read.

    Example:
        report = await check_target("shop.py:Shop", on_check=print)
    """
    request = Request(
        target=target,
        kwargs=kwargs or {},
        data=data,
        limit=limit,
        tokenizer=tokenizer,
        timeout_s=timeout_s,
        path=sys.path,
    )
    news: asyncio.Queue[News] = asyncio.Queue()
    decoder = msgspec.json.Decoder(News)
    command = [*module_command("agentrl.check.worker"), _encoded(request)]
    with TemporaryDirectory(prefix="agentrl-check-") as folder:
        async with child(
            "check",
            command,
            log_path=Path(folder, "check.log"),
            on_line=lambda line: news.put_nowait(decoder.decode(line)),
        ) as process:
            reader = _Reader(process=process, news=news, on_begin=on_begin, on_check=on_check, progress=progress)
            name = await reader.read_all()
            printed = process.log_tail(MAX_OUTPUT_LINES) if process.log_path.stat().st_size else ""
    return CheckReport(env=name or target, checks=tuple(reader.checks), printed=printed)


def _encoded(request: Request) -> str:
    try:
        return msgspec.json.encode(request).decode()
    except TypeError as error:
        raise ConfigError(
            f"kwargs={dict(request.kwargs)} cannot be passed to the process that checks: {error}. Give the class in "
            "place of its name: it is checked in this process"
        ) from None


@dataclass(kw_only=True)
class _Reader:
    process: Child
    news: asyncio.Queue[News]
    on_begin: Callable[[str], None]
    on_check: OnCheck
    progress: OnProgress
    checks: list[Check] = field(default_factory=list)
    current: str = "loading"

    async def read_all(self) -> str | None:
        """Pass everything on, to the end; the name of the class. Raises ConfigError."""
        ended = asyncio.ensure_future(self.process.wait())
        patience_s = START_S
        try:
            while (news := await self._next(ended, patience_s)) is not None:
                patience_s = SILENT_S
                if news.cannot_start is not None:
                    raise ConfigError(news.cannot_start)
                if news.ended is not None:
                    return news.ended
                self._pass_on(news)
        finally:
            ended.cancel()
        if not ended.done():
            self._fail(f"the environment's code keeps the process from doing anything else for {patience_s:g} s")
        elif ended.result() != BLOCKED:  # it has said itself why
            self._fail(f"the environment's code ended the process, with exit code {ended.result()}")
        return None

    async def _next(self, ended: asyncio.Future[int], patience_s: float) -> News | None:
        """The next line; None when there is none within `patience_s`, or the process has ended."""
        line = asyncio.ensure_future(self.news.get())
        waiting: set[asyncio.Future[Any]] = {line, ended}
        await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if not line.done() and ended.done():
            await asyncio.wait({line}, timeout=1.0)  # what it wrote last may still be on its way
        if line.done():
            return line.result()
        line.cancel()
        return None

    def _pass_on(self, news: News) -> None:
        if news.begin is not None:
            self.current = news.begin
            self.on_begin(news.begin)
        if news.progress is not None:
            self.progress(*news.progress)
        if news.check is not None:
            self.checks.append(news.check)
            self.on_check(news.check)

    def _fail(self, detail: str) -> None:
        self._pass_on(News(check=Check(name=self.current, detail=detail, level="FAIL")))
