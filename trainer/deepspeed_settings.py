"""DeepSpeed's settings, derived from our config, and its engine. Independent of gradients and batches."""

from __future__ import annotations

import logging
from typing import Any

import torch

from agentrl.config import Config
from trainer import ranks

REDUCE_BUCKET_ELEMENTS = 50_000_000


def deepspeed_config(config: Config) -> dict[str, Any]:
    """DeepSpeed's JSON config (https://www.deepspeed.ai/docs/config-json). Everything in it comes from ours."""
    learner, is_half = config.learner, config.model.dtype == "bfloat16"
    zero: dict[str, Any] = {
        # With bfloat16 weights DeepSpeed adds gradients in float32 from stage 1 on only. Its optimizer of stage 0 is
        # that of stage 1 but for this.
        "stage": max(learner.zero_stage, 1) if is_half else learner.zero_stage,
        "overlap_comm": False,
        "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
        "allgather_bucket_size": REDUCE_BUCKET_ELEMENTS,
    }
    if learner.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": learner.grad_clip,
        "bf16": {"enabled": is_half},
        # Gradients of packs and of ranks are added in float32 whatever the weights' type.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def start_engine(model: Any, config: Config) -> Any:
    """DeepSpeed's engine around `model` and torch's AdamW, with an optimizer state that has seen no step.

    torch's AdamW and not DeepSpeed's CPU Adam, also with offload: a run with the latter does not resume
    bit-identically.
    """
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    ranks.start_deepspeed()
    # The rate is 0 during initialization: in stage 0 with bfloat16 DeepSpeed makes a step of zero gradient by itself,
    # which would decay the weights. Its state is cleared below, since it would count in Adam's bias correction.
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(config))
    optimizer.state.clear()
    set_rates(engine, config)
    return engine


def set_rates(engine: Any, config: Config) -> None:
    """Set the optimizer's hyperparameters to the config's, whatever they were."""
    learner = config.learner
    for group in engine.optimizer.param_groups:
        group |= {"lr": learner.lr, "betas": learner.betas, "weight_decay": learner.weight_decay}
