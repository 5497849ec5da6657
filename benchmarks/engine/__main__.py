"""`python -m benchmarks.engine`: measures, prints, and writes benchmarks/engine.md."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from agentrl.config import EngineConfig
from agentrl.engine import vllm_command
from benchmarks import reporting
from benchmarks.engine import gap, goals, head, kv, parity, prefix, rho, throughput

REPORT = reporting.ROOT / "benchmarks" / "engine.md"
SECTIONS = {
    "throughput": throughput.measure,
    "prefix": prefix.measure,
    "gap": gap.measure,
    "parity": parity.measure,
    "head": head.measure,
    "rho": rho.measure,
    "kv": kv.measure,
}


async def measure(names: list[str], grown: Callable[[str], Any], *, quick: bool, large: bool) -> str:
    """The report, as Markdown. `grown` is given it after each section, whatever becomes of the next."""
    config = EngineConfig()
    settings = {
        "engine": " ".join(vllm_command.check_version()) + f" on {vllm_command.device_of(config)}",
        "versions": ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "aiohttp")),
        "sections": ", ".join(names) + (" (--quick)" if quick else ""),
    }
    text = reporting.header("Engine: what our client and its weight updates cost", settings) + goals.head(names)
    sections = SECTIONS | {"gap": partial(gap.measure, large=large)}
    for name in names:
        began = time.monotonic()
        text += await sections[name](config, quick=quick)
        grown(text)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller models: to see that it works")
    parser.add_argument("--large", action="store_true", help="the update gap of a model of 2 GB, too")
    parser.add_argument("--out", type=Path, default=REPORT)
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - SECTIONS.keys():
        parser.error(f"unknown sections {sorted(unknown)}; there are {', '.join(SECTIONS)}")
    report = asyncio.run(measure(names, options.out.write_text, quick=options.quick, large=options.large))
    print(report)


if __name__ == "__main__":
    main()
