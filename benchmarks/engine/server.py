"""Real vLLM servers as a run starts them, and what they say of themselves. Measures nothing itself."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agentrl.config import EngineConfig
from sandbox.backends import processes
from trainer.gpu_report import serving

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


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
    """See trainer.gpu_report.serving.serve."""
    async with serving.serve(model, config=config, dtype=dtype, max_context=max_context, log_folder=log_folder) as (
        url,
        part,
    ):
        yield Server(url=url, pid=part.process.pid)
