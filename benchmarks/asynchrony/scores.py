"""Held-out scores of a run's weights, measured after the run so that they take none of its time.

Independent of arms and clocks.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.report.evaluation import evaluate
from agentrl.types import WeightsRef
from benchmarks.asynchrony.stage import Stage


async def score(stage: Stage, version: int) -> dict[str, Any]:
    """avg@n of the weights that the engine holds."""
    found = await evaluate(
        stage.held_out,
        make_group=lambda index, task: stage.held_out_player.play_group(stage.engine, index, task, kind="eval"),
        policy_version=version,
        max_concurrent_groups=32,
    )
    episodes = len(stage.held_out) * stage.config.eval.samples_per_task
    return {"version": version, "avg": round(found.result.avg, 5), "episodes": episodes}


async def scores_of(stage: Stage, kept: Mapping[int, WeightsRef]) -> list[dict[str, Any]]:
    """Scores of the versions that were kept, in order; the copies are removed.

    The start is always the same and is measured once, by `calibrate`.
    """
    scores: list[dict[str, Any]] = []
    for version in sorted(set(kept) - {0}):
        await stage.engine.update_weights(kept[version])
        scores.append(await score(stage, version))
    for ref in kept.values():
        if ref.path is not None:
            shutil.rmtree(Path(ref.path), ignore_errors=True)
    return scores
