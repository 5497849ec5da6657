"""Starts real vLLM servers as a run does, and reads what they say of themselves. Measures nothing itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agentrl.config import EngineConfig
from agentrl.engine import vllm_command, vllm_server
from agentrl.supervision.child import child
from agentrl.supervision.serving import free_port
from sandbox.backends import processes

SERVED_NAME = "policy"
START_TIMEOUT_S = 240.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_started = 0


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running vLLM."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """CPU time its processes used so far."""
        pids = processes.descendants(self.pid)
        fields = [processes.read(f"/proc/{pid}/stat").rpartition(")")[2].split() for pid in pids]
        return sum(int(stat[11]) + int(stat[12]) for stat in fields if stat) / _TICKS_PER_S

    async def counter(self, name: str) -> float:
        """One of vLLM's own counters, summed over its labels."""
        return sum(sample.value for sample in await self._samples() if sample.name == name)

    async def block_tokens(self) -> int:
        """Tokens of a block of the prefix cache: only whole blocks are reused."""
        labels = [s.labels for s in await self._samples() if s.name == "vllm:cache_config_info"]
        return int(labels[0]["block_size"])

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            (await http.post("/reset_prefix_cache")).raise_for_status()

    async def _samples(self) -> list[Sample]:
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            text = (await http.get("/metrics")).text
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


@asynccontextmanager
async def serve(
    model: Path, *, config: EngineConfig, dtype: str, max_context: int, log_folder: Path
) -> AsyncIterator[Server]:
    """The server of a run, but with its statistics switched on. Raises EngineError with the end of its log."""
    global _started
    _started += 1
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
    url = f"http://{config.host}:{port}"
    async with child("engine", argv, log_path=log_folder / f"engine-{_started}.log", env=env) as part:
        await vllm_server.wait_ready(url, poll=part.poll, log=part.log_tail, timeout_s=START_TIMEOUT_S)
        await asyncio.sleep(0.5)  # what it does after it became ready is no load of ours
        yield Server(url=url, pid=part.process.pid)
