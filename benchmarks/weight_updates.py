"""What a weight update costs with all weights and with only those that changed: `python -m benchmarks.weight_updates`.

`changes`: which share of the weights changes in a step of the quickstart's training, by dtype and learning rate, and
how large what is written is; from runs that export every version. `updates`: bytes, duration and gap of an update, by
size of the model and number of engines.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.config import EngineConfig, LoraConfig
from agentrl.engine.pool import EnginePool
from agentrl.engine.vllm import changes, loading
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.engine.weight_updates import UpdateSettings
from benchmarks import reporting
from benchmarks.engine.server import serve
from trainer import lora
from trainer.gpu_report import random_models as models
from trainer.gpu_report.publishing import DEADLINE_S, Publication, Sender
from trainer.gpu_report.serving import SERVED_NAME
from trainer.weights.source import WeightSource

REPORT = reporting.ROOT / "benchmarks" / "weight_updates.md"
CONFIG = reporting.ROOT / "configs" / "quickstart.yaml"
RATES = (("bfloat16", "1e-6"), ("bfloat16", "1e-5"), ("bfloat16", "1e-4"), ("bfloat16", "4e-4"), ("float32", "1e-6"))
NUM_STEPS = 6
SIZES = ("1 MB", "50 MB", "500 MB")
ENGINES = (1, 2, 4)
KINDS = ("all", "changed", "adapter")
SHARE = 0.01
"""Of the elements that change between two updates of the second section."""
RANK = 16
REPEATS = 3
PREDICTED_CHANGES = """
Predicted before the measurement: Adam moves an element by 0.1 to 1 learning rate, and bfloat16 numbers near w lie
2^-8 |w| apart, so that of weights of 0.02 to 0.1 about 0.2 to 0.5 % change at 1e-6, 2 to 5 % at 1e-5, 20 to 40 % at
1e-4 and 60 to 90 % at 4e-4; in float32 nearly all. Bytes: three times the share where it is small, and at 4e-4 nearly
all.
"""
PREDICTED_UPDATES = """
Predicted before the measurement: changes of 1 % take 3 % of the bytes; an adapter takes about 50 %, 10 % and 4 % of
them at the three sizes. The gap is as long as with all weights, or up to 10 % longer: the load into vLLM dominates, and
putting the weights together is new. Adapters take 10 to 30 % longer, because each layer is multiplied in float32.
Several engines share the processor's cores, so that the gap grows with their number.
"""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Between two versions of a model."""

    share: float  # of its elements
    num_bytes: int  # of what is written of it
    whole_bytes: int

    @property
    def relative(self) -> float:
        """Bytes written, of those of all weights."""
        return self.num_bytes / self.whole_bytes


def change(old: dict[str, Tensor], new: dict[str, Tensor]) -> Change:
    """Compare two versions.

    >>> zeros = torch.zeros(100, dtype=torch.bfloat16)
    >>> change({"w": zeros}, {"w": torch.cat([zeros[:99], zeros[:1] + 1])})
    Change(share=0.01, num_bytes=6, whole_bytes=200)
    """
    parts = [changes.difference(old[name], new[name]) for name in new]
    num_changed = sum(int((old[name] != new[name]).count_nonzero()) for name in new)
    return Change(
        share=num_changed / sum(tensor.numel() for tensor in new.values()),
        num_bytes=sum(tensor.nbytes for part in parts for tensor in part.values()),
        whole_bytes=sum(tensor.nbytes for tensor in new.values()),
    )


def changes_section(model: str) -> str:
    """Train with each dtype and rate, and compare the versions."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as temporary:
        for dtype, rate in RATES:
            versions = _trained(Path(temporary), model, dtype, rate)
            steps = [change(old, new) for old, new in pairwise(versions)]
            far = change(versions[0], versions[-1])
            rows.append(
                [
                    f"{dtype}, {rate}",
                    reporting.spread([100 * step.share for step in steps], 2),
                    reporting.spread([100 * step.relative for step in steps], 2),
                    f"{100 * far.share:.2f}",
                    f"{100 * (1 + 7 * statistics.fmean(step.relative for step in steps)) / 8:.1f}",
                ]
            )
    intro = (
        "\n## What changes in a step\n\nReal steps of configs/quickstart.yaml (8 groups of 8 episodes, Adam), "
        f"{NUM_STEPS} a run: median (least to greatest). Share: elements of which a bit differs from the "
        "version before. Bytes: what is written, of all weights' bytes. `weight_delta: 8`: the mean of one whole "
        "publication and seven of changes.\n\n"
    )
    columns = ["dtype, learner.lr", "share, %", "bytes, %", f"share after {NUM_STEPS - 1} steps, %", "delta 8, %"]
    return intro + reporting.table(columns, rows) + PREDICTED_CHANGES


def _trained(folder: Path, model: str, dtype: str, rate: str) -> list[dict[str, Tensor]]:
    """The weights after each step."""
    name = f"{dtype}-{rate}"
    settings = [
        f"name={name}",
        f"out_dir={folder}",
        f"model.path={model}",
        f"model.dtype={dtype}",
        f"learner.lr={rate}",
    ]
    settings += ["learner.warmup_steps=0", "learner.save_every=1", f"train.steps={NUM_STEPS}", "train.max_minutes=20"]
    settings += ["eval.every=0", "eval.num_tasks=1", "eval.samples_per_task=1"]
    subprocess.run([sys.executable, "-m", "agentrl", "train", str(CONFIG), *settings], check=True, cwd=reporting.ROOT)
    exports = [folder / name / "checkpoints" / f"step_{step}" for step in range(1, NUM_STEPS + 1)]
    return [dict(loading.tensors_of(export)) for export in exports]


async def updates_section(sizes: Sequence[str], numbers: Sequence[int]) -> str:
    """Publish a random model again and again."""
    rows = []
    for size in sizes:
        for number in numbers:
            rows += await _measured(size, number)
    intro = (
        "\n## Updates\n\nQwen3-shaped bfloat16 weights (random; half the bytes of the size in float32), of which "
        f"{100 * SHARE:g} % change between two updates, or an adapter of rank {RANK} on every linear layer; folders in "
        "shared memory; idle engines on the same machine. "
        "MB: written once, and read by every engine. Gap: the longest of the engines. "
        f"{REPEATS} updates after two that warm up: median (least to greatest).\n\n"
    )
    columns = ["model, engines, weights", "MB", "gap, s", "published in, s"]
    return intro + reporting.table(columns, rows) + PREDICTED_UPDATES


async def _measured(size: str, number: int) -> list[list[str]]:
    """A row for each kind, with the same servers."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-", dir="/dev/shm") as temporary:
        folder = Path(temporary)
        path = models.save(_model(size, "all"), folder / "model")
        config = EngineConfig(kv_cache_bytes=2**26)
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(
                    serve(path, config=config, dtype="bfloat16", max_context=512, log_folder=folder)
                )
                for _ in range(number)
            ]
            for at, kind in enumerate(KINDS):
                done = await _published([server.url for server in servers], size, kind, folder / kind, 100 * at)
                rows.append([f"{size}, {number}, {kind}", *_figures(done)])
                print(rows[-1], flush=True)
    return rows


def _model(size: str, kind: str) -> Any:
    model = models.make("Qwen3", models.BY_SIZE[size], tied=False, dtype="bfloat16")
    return lora.with_adapters(model, LoraConfig(rank=RANK, alpha=2 * RANK)) if kind == "adapter" else model


async def _published(urls: Sequence[str], size: str, kind: str, folder: Path, version: int) -> list[Publication]:
    """Publish the versions after `version`, without those that warm up."""
    model = _model(size, kind)
    config = EngineConfig(weight_delta=None if kind == "all" else 1000, kv_cache_bytes=2**26)
    settings = UpdateSettings(update_timeout_s=DEADLINE_S, parity_bound=0.5)
    async with EnginePool([VLLMEngine(url, model=SERVED_NAME, updates=settings) for url in urls]) as engines:
        pool: Any = engines
        source = WeightSource(model, dtype=torch.bfloat16)
        sender = Sender(model, mode="safetensors", config=config, folder=folder, source=source)
        done = [await _next(model, sender, pool, version + number) for number in range(1, REPEATS + 3)]
        await sender.close()
    return done[2:]


def _figures(done: Sequence[Publication]) -> list[str]:
    sizes = [publication.update.num_bytes / 1e6 for publication in done]
    gaps_s = [publication.update.gap_s for publication in done]
    totals_s = [publication.total_s for publication in done]
    return [f"{statistics.median(sizes):.2f}", reporting.spread(gaps_s, 3), reporting.spread(totals_s, 3)]


async def _next(model: Any, sender: Sender, pool: Any, version: int) -> Publication:
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1e-3)
            elif not lora.is_adapted(model):
                parameter[torch.rand(parameter.shape, generator=generator) < SHARE] *= 1.01
    probe = await asyncio.to_thread(models.probe, lora.base_of(model))
    return await sender.publish(pool, version, probe)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/modmath-tiny", help="the quickstart's, after its warm start")
    parser.add_argument("--only", choices=["changes", "updates"], help="one section")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--engines", default=",".join(map(str, ENGINES)))
    parser.add_argument("--out", type=Path, default=REPORT)
    options = parser.parse_args()
    report = reporting.header("Weight updates: all weights, or those that changed", {})
    if options.only != "updates":
        report += changes_section(options.model)
        options.out.write_text(report)
    if options.only != "changes":
        numbers = [int(number) for number in options.engines.split(",")]
        report += asyncio.run(updates_section(options.sizes.split(","), numbers))
        options.out.write_text(report)
    print(report)


if __name__ == "__main__":
    main()
