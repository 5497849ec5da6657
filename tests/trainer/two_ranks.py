"""Run under torchrun by test_learner.py: three steps and a fourth one's metrics, saved by rank 0."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed
from trainer_builders import batch, config, mixed_groups
from transformers import AutoModelForCausalLM

from trainer import ranks
from trainer.learner import Learner


def main(model_dir: Path, out_dir: Path) -> None:
    torch.set_num_threads(1)
    groups = mixed_groups(AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32").eval())
    learner = Learner(config(model_dir, learner={"lr": 1e-3, "grad_clip": 0.05, "weight_decay": 0.01}))
    for version in range(3):
        learner.step(batch(groups, version=version))
    weights = torch.cat([p.detach().float().flatten() for p in learner.model.parameters()])
    metrics = learner.step(batch(groups, version=3, max_lag=3)).metrics
    if distributed.get_rank() == 0:
        torch.save({"weights": weights, "metrics": metrics}, out_dir / "result.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    import os

    ranks.set_defaults(os.environ)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
