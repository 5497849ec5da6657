"""A worker that is started by hand, and whose network drops what it and the orchestrator send, while both run on."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agentrl.supervision import secrets
from agentrl.supervision.child import Child, module_command
from agentrl.supervision.serving import free_port
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.workers.dispatcher import Dispatcher
from tests.agentrl.workers.test_worker_processes import SECRETS, STEPS, busy, config_of, whole_run
from tests.e2e.kill_judge import fates

NAME = "by-hand"


class Network:
    """Forwards connections to a port, and can be cut. As TCP does, it delivers late what was sent meanwhile."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.works = asyncio.Event()
        self.works.set()

    @asynccontextmanager
    async def url(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:  # nobody listens there yet
            writer.close()
            return
        await asyncio.gather(self._forward(reader, back), self._forward(there, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                await self.works.wait()
                writer.write(data)
                await writer.drain()
        await self.works.wait()
        writer.close()


@asynccontextmanager
async def worker_by_hand(url: str, folder: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    command = [*module_command("agentrl"), "rollout-worker", "--orchestrator", url, "--name", NAME]
    env = {**os.environ, secrets.RUN: SECRETS.run, secrets.SANDBOX: SECRETS.sandbox}
    with (folder / "by-hand.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
async def test_a_worker_behind_a_cut_network_loses_its_groups_to_others_and_joins_again_when_it_is_mended(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: TurnTokenizer
) -> None:
    port = free_port()
    network = Network(port)

    async def cut(dispatcher: Dispatcher, parts: list[Child]) -> None:
        await busy(dispatcher, NAME)
        network.works.clear()
        while dispatcher.num_lost < 1:
            await asyncio.sleep(0.05)
        assert NAME not in dispatcher.names
        network.works.set()
        while NAME not in dispatcher.names:
            await asyncio.sleep(0.05)

    settings: dict[str, Any] = {"world": "Slow", "worker_timeout_s": 4}
    alone = await whole_run(config_of(tmp_path, tokenizer_dir, workers=0, **settings), tokenizer)
    config = config_of(tmp_path, tokenizer_dir, workers=1, worker_listen=f"127.0.0.1:{port}", **settings)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(network.url())
        process = await stack.enter_async_context(worker_by_hand(url, tmp_path))
        run = await whole_run(config, tokenizer, disturb=cut)
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(process.wait) == 0, "it ends with the run"
    assert len(run.batches) == STEPS and run.num_lost == 1
    assert run.trained() == alone.trained() and run.evaluated() == alone.evaluated()
    assert fates(run.folder.journal) == fates(alone.folder.journal), "each group has one fate, and the same"
