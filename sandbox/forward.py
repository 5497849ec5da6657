"""Passes TCP connections on: `python -m sandbox.forward PORT HOST:PORT`.

docker-compose.yml uses it to publish the sandbox's port, which a container on an internal network cannot do itself.
Knows nothing of what passes through.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from functools import partial

CONNECT_DEADLINE_S = 10.0
_READ_BYTES = 65_536


async def forward(port: int, host: str, target_port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with await asyncio.start_server(partial(_connection, host, target_port), port=port):
        await stop.wait()


async def _connection(host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            there_reader, there_writer = await asyncio.open_connection(host, port)
        async with asyncio.TaskGroup() as group:
            group.create_task(_pass_on(reader, there_writer))
            group.create_task(_pass_on(there_reader, writer))
    writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the sender closes, which is passed on as well."""
    try:
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


if __name__ == "__main__":
    target, _, target_port = sys.argv[2].rpartition(":")
    asyncio.run(forward(int(sys.argv[1]), target, int(target_port)))
