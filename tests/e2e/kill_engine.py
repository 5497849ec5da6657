"""A vLLM server that outlives the runs, as on a cluster: several runs use it, and the test restarts it after a kill."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil

from agentrl.engine import vllm_server as engine_server
from agentrl.supervision.serving import free_port


class OutsideEngine:
    """`agentrl engine` as a process. A restart keeps the port."""

    def __init__(self, folder: Path, config: Path, overrides: list[str]) -> None:
        self._port = free_port()
        self._log = folder / "engine.log"
        self._command = [sys.executable, "-m", "agentrl", "engine", str(config), *overrides]
        self._command += ["engine.host=127.0.0.1", f"engine.port={self._port}"]
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start the server; after a kill, again on the same port."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        """Block until the server answers."""
        waiting = engine_server.wait_ready(
            self.url, poll=self._process.poll, log=lambda: self._log.read_text()[-3000:], timeout_s=600
        )
        asyncio.run(waiting)

    def processes(self) -> list[psutil.Process]:
        """The living processes of the server; the first one is the HTTP server."""
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """Kill every process of the server."""
        for process in self.processes():
            process.kill()
        self._process.wait(10)
