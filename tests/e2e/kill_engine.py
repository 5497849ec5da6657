"""A vLLM server beside the runs, as on a cluster: started once for several, and again by its owner when killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil

from agentrl.engine import vllm_server as engine_server
from agentrl.supervision.serving import free_port


class OutsideEngine:
    """`agentrl engine` on a port that it keeps. `model` is what the config serves."""

    def __init__(self, folder: Path, config: Path, overrides: list[str]) -> None:
        self._port = free_port()
        self._log = folder / "engine.log"
        self._command = [sys.executable, "-m", "agentrl", "engine", str(config), *overrides]
        self._command += ["engine.host=127.0.0.1", f"engine.port={self._port}"]
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Also after it was killed, on the same port."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        """Until it answers."""
        waiting = engine_server.wait_ready(
            self.url, poll=self._process.poll, log=lambda: self._log.read_text()[-3000:], timeout_s=600
        )
        asyncio.run(waiting)

    def processes(self) -> list[psutil.Process]:
        """Those that live, the one that answers first."""
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """All of it."""
        for process in self.processes():
            process.kill()
        self._process.wait(10)
