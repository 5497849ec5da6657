"""A sandbox service in a child process, for `SandboxClient.embedded`.

It listens on a free port of 127.0.0.1 with its own token, and ends with the process that started it. Loads no server
code here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from sandbox.protocol import SandboxUnavailable

START_DEADLINE_S = 90.0
STOP_DEADLINE_S = 15.0


@contextlib.asynccontextmanager
async def local_service(
    backend: str, slots: int, options: dict[str, int | str | bool]
) -> AsyncIterator[tuple[str, str]]:
    """(url, token) of a service in a child process, which ends with this block or with this process."""
    token = secrets.token_urlsafe(24)
    ready_read, ready_write = os.pipe()
    alive_read, alive_write = os.pipe()  # only this process holds it open; the service stops when it closes
    # -P: not the `sandbox` folder of the working directory, but the one of PYTHONPATH, below.
    command = [sys.executable, "-P", "-m", "sandbox", "--port", "0", "--backend", backend, "--slots", str(slots)]
    command += ["--token-env", "SANDBOX_TOKEN", "--ready-fd", str(ready_write), "--alive-fd", str(alive_read)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [] if value is False else [flag, str(value)]
    path = os.pathsep.join([_package_root(), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, "PYTHONPATH": path, "SANDBOX_TOKEN": token},
            pass_fds=[ready_write, alive_read],
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only this process, which then stops the service
        )
    finally:
        os.close(ready_write)
        os.close(alive_read)
    errors: list[str] = []
    reader = asyncio.create_task(_collect_errors(process, errors))
    try:
        port = await _read_ready(ready_read, errors, reader)
        yield f"http://127.0.0.1:{port}", token
    finally:
        os.close(alive_write)
        await asyncio.shield(_stop(process, reader))


def _package_root() -> str:
    return str(Path(__file__).resolve().parents[1])


async def _collect_errors(process: asyncio.subprocess.Process, errors: list[str]) -> None:
    """Read the service's stderr, so that its pipe never fills, and keep the last lines."""
    assert process.stderr is not None
    while line := await process.stderr.readline():
        errors.append(line.decode("utf-8", "replace").rstrip())
        del errors[:-20]


async def _read_ready(fd: int, errors: list[str], reader: asyncio.Task[None]) -> int:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            await readable.wait()
            line = os.read(fd, 4096)
            if line:
                return int(json.loads(line)["port"])
            await reader  # it ended: read the rest of its stderr
    except TimeoutError:
        errors.append("it was not ready in time")
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    raise SandboxUnavailable(f"the local sandbox service did not start: {errors[-1] if errors else 'no reason given'}")


async def _stop(process: asyncio.subprocess.Process, reader: asyncio.Task[None]) -> None:
    """Wait for the service, which stops when the pipe closes, else kill it. The kernel then ends its sandboxes."""
    try:
        async with asyncio.timeout(STOP_DEADLINE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    await reader
