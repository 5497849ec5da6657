"""Runs commands on configs/quickstart.yaml, for benchmarks that need its model or a run of it."""

from __future__ import annotations

import asyncio
import sys

from benchmarks import reporting

CONFIG = "configs/quickstart.yaml"
WARMSTART = ("model.warmstart.demonstrations=800", "model.warmstart.steps=400")
"""A shorter warm start than the config's."""


async def run(name: str, *command: str, timeout_s: float) -> None:
    """`python -m COMMAND` in the checkout. Raises RuntimeError, with `name` and the end of the output, or TimeoutError.

    Example: `await run("the training run", "agentrl", "train", CONFIG, timeout_s=420)`.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command),
        cwd=reporting.ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except BaseException:
        process.terminate()  # a run stops its own parts
        await process.wait()
        raise
    if process.returncode:
        raise RuntimeError(f"{name} ended with {process.returncode}: {output.decode()[-2000:]}")
