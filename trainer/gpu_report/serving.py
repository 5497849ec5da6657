"""Starts a vLLM server as a run does, for measurements. Measures nothing itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from agentrl.config import EngineConfig
from agentrl.engine import vllm_command, vllm_server
from agentrl.supervision.child import Child, child
from agentrl.supervision.serving import free_port

SERVED_NAME = "policy"
START_TIMEOUT_S = 240.0
_numbers = count(1)


@asynccontextmanager
async def serve(
    model: Path, *, config: EngineConfig, dtype: str, max_context: int, log_folder: Path, without: str | None = None
) -> AsyncIterator[tuple[str, Child]]:
    """URL and process of the server of a run, but with its statistics switched on, and without the option `without`.

    Raises EngineError with the end of its log.
    """
    port = free_port(config.host)
    argv, env = vllm_command.command(
        model_path=str(model),
        served_name=SERVED_NAME,
        host=config.host,
        port=port,
        config=config,
        max_context=max_context,
        dtype=dtype,
        seed=0,
    )
    argv.remove("--disable-log-stats")
    if without is not None:
        del argv[argv.index(without) : argv.index(without) + 2]
    url = f"http://{config.host}:{port}"
    log_path = log_folder / f"engine-{next(_numbers)}.log"
    async with child("engine", argv, log_path=log_path, env=env, has_own_temporary=True) as part:
        await ready(url, part)
        yield url, part


async def ready(url: str, part: Child) -> None:
    """Return once the server answers and is idle. Raises EngineError."""
    await vllm_server.wait_ready(url, poll=part.poll, log=part.log_tail, timeout_s=START_TIMEOUT_S)
    await asyncio.sleep(0.5)  # what it does after it became ready is no load of ours


@asynccontextmanager
async def outlasting(requests: Sequence[asyncio.Task[Any]]) -> AsyncIterator[None]:
    """Cancels the requests after the block. Raises RuntimeError where one ended before the block did."""
    try:
        yield
        if ended := sum(request.done() for request in requests):
            raise RuntimeError(f"{ended} of {len(requests)} requests ended before the measurement did")
    finally:
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
