"""Run under torchrun by test_lora.py: three steps and a fourth one's metrics, saved by rank 0.

The arguments are the model's folder, where to save, and the sections of the config as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoModelForCausalLM

from tests.trainer.trainer_builders import (
    batch,
    config,
    divide_small_weights,
    mixed_groups,
    whole_weights,
    with_steady_updates,
)
from trainer import ranks
from trainer.learner import Learner
from trainer.process_end import end_process


def main(model_dir: Path, out_dir: Path, sections: str) -> None:
    torch.set_num_threads(1)
    divide_small_weights()
    groups = mixed_groups(AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32").eval())
    learner = with_steady_updates(Learner(config(model_dir, **json.loads(sections))))
    norms = [learner.step(batch(groups, version=v)).metrics["learner/grad_norm"] for v in range(3)]
    weights = whole_weights(learner.model)
    metrics = learner.step(batch(groups, version=3, max_lag=3)).metrics
    if distributed.get_rank() == 0:
        torch.save({"weights": weights, "metrics": metrics, "norms": norms}, out_dir / "result.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    ranks.set_defaults(os.environ)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    end_process()
