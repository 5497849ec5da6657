"""Run under torchrun by test_weight_source.py: what the source yields under each ZeRO stage, before and after a step.

Each rank writes what it saw. ZeRO-3 splits every parameter here, however small.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import distributed
from transformers import AutoModelForCausalLM

from agentrl.engine.checksum import Checksum
from agentrl.training.model_folder import Origin
from agentrl.types import Probe
from trainer import ranks
from trainer.process_end import end_process
from trainer.weights import folder as weights
from trainer.weights.source import WeightSource

STAGES = (0, 1, 2, 3)


def under_zero(model: Any, stage: int) -> Any:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def one_step(engine: Any) -> None:
    ids = torch.arange(40)[None]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def seen(source: WeightSource, model: Any) -> dict[str, Any]:
    checksum, whole = Checksum(), []
    for name, tensor in source:
        checksum.add(name, tensor)
        present = [n for n, p in model.named_parameters() if p.numel() and n != name]
        whole.append(len({n.rpartition("layers.")[2].partition(".")[0] for n in present}))
    return {
        "checksum": checksum.hexdigest(),
        "num_bytes": checksum.num_bytes,
        "metadata": [[meta.name, str(meta.dtype), list(meta.shape)] for meta in source.metadata()],
        "most_layers_whole": max(whole),
        "is_split": source.is_split,
        "left_whole": sum(p.numel() > 0 for p in model.parameters()),
    }


def main(model_dir: Path, out: Path) -> None:
    torch.set_num_threads(1)
    ranks.join(timeout_s=60)
    is_first = distributed.get_rank() == 0
    for stage in STAGES:
        engine = under_zero(AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32"), stage)
        source = WeightSource(engine.module, dtype=torch.float32)
        result = {"before": seen(source, engine.module)}
        one_step(engine)
        result["after"] = seen(source, engine.module)
        if is_first:
            weights.publish(source, out / f"stage{stage}", policy_version=0, probe=Probe(token_ids=(), logprobs=()))
            origin = Origin(run="ranks", version=0)
            target = out / f"export{stage}"
            weights.export(source, engine.module, str(model_dir), target, origin=origin, max_shard_bytes=200_000)
        else:
            source.take_part()
            source.take_part()
        (out / f"stage{stage}_rank{distributed.get_rank()}.json").write_text(json.dumps(result))
    distributed.destroy_process_group()


if __name__ == "__main__":
    ranks.set_defaults(os.environ)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    end_process()
