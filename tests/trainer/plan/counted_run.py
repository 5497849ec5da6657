"""A real learner's first two steps, counted phase by phase. Run under torchrun by test_plan_memory.py for two ranks.

The arguments are the model's folder, where to write the results, and a JSON list of sections of configs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from agentrl.engine.checksum import CHUNK_WORDS, WORD_BYTES, checksum_of
from agentrl.testing import group
from tests.trainer.trainer_builders import batch, config, divide_small_weights, episode
from trainer import checkpoint, deepspeed_settings, learner, startup_proof
from trainer.plan.counting import Counter
from trainer.plan.memory import CHECKSUM_BYTES
from trainer.process_end import end_process
from trainer.weights.source import WeightSource

SCRATCH_ON_CPU = 4 * CHUNK_WORDS * WORD_BYTES
"""Of the checksum: two chunks of keys, one of products, and one of what is left of a tensor."""
SHAPE = ((3, 4),)
NUM_EPISODES = 4


def counted(model_dir: Path, out: Path, sections: dict[str, Any], *, num_groups: int = 1) -> dict[str, int]:
    """Peak bytes of each phase: of the start, of the second step, and of what follows it."""
    with Counter("cpu") as counter, _as_on_a_gpu():
        peaks: dict[str, int] = {}

        def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def measured(*args: Any, **kwargs: Any) -> Any:
                counter.start_phase()
                result = call(*args, **kwargs)
                peaks[name] = counter.peak_bytes
                return result

            return measured

        with _replaced(startup_proof, "prepare", timed), _replaced(learner, "start_engine", timed, "start"):
            ours = learner.Learner(config(model_dir, **sections))
        peaks["prove"] = peaks.pop("prepare")
        method = ours._method
        method.estimate = timed("estimate", method.estimate)  # type: ignore[method-assign]
        method.hand_over = timed("hand-over", method.hand_over)  # type: ignore[method-assign]
        ours.engine.step = timed("step", ours.engine.step)
        for version in range(2):
            ours.step(batch([_group(number) for number in range(num_groups)], version=version))
        source = WeightSource(ours.model, dtype=ours.model.dtype)
        timed("publish", checksum_of)(source)
        peaks["publish"] += CHECKSUM_BYTES - SCRATCH_ON_CPU
        timed("checkpoint", checkpoint.save)(ours, out / "states", keep=1)
    return peaks


def _group(number: int) -> Any:
    episodes = [episode(f"{number}-{i}", reward=float(i % 2), seed=i, shape=SHAPE) for i in range(NUM_EPISODES)]
    return group(number, episodes)


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """AdamW in its form for GPUs, and buckets that are small beside the model."""
    own, bucket = torch.optim.AdamW, deepspeed_settings.REDUCE_BUCKET_ELEMENTS

    class ForEach(own):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, foreach=True, **kwargs)

    torch.optim.AdamW, deepspeed_settings.REDUCE_BUCKET_ELEMENTS = ForEach, 1000  # type: ignore[misc]
    try:
        yield
    finally:
        torch.optim.AdamW, deepspeed_settings.REDUCE_BUCKET_ELEMENTS = own, bucket  # type: ignore[misc]


@contextmanager
def _replaced(owner: Any, name: str, timed: Callable[..., Any], phase: str | None = None) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, timed(phase or name, own))
    try:
        yield
    finally:
        setattr(owner, name, own)


def main(model_dir: Path, out: Path, sections: str) -> None:
    torch.set_num_threads(1)
    divide_small_weights()
    peaks = [
        counted(model_dir, out / str(number), one, num_groups=2) for number, one in enumerate(json.loads(sections))
    ]
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(peaks))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    from trainer import ranks

    ranks.set_defaults(os.environ)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    end_process()
