"""DeepSpeed's settings from our config, for every stage, and the engine made with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.errors import ConfigError
from tests.trainer.trainer_builders import batch, config, mixed_groups
from trainer import ranks
from trainer.deepspeed_settings import deepspeed_config, start_engine
from trainer.learner import Learner


def settings(**learner: Any) -> dict[str, Any]:
    return deepspeed_config(config(Path(), learner=learner))


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_stage_has_our_numbers_and_nothing_of_deepspeeds_own(zero_stage: int) -> None:
    found = settings(zero_stage=zero_stage, grad_clip=0.7)
    assert found["zero_optimization"]["stage"] == zero_stage
    assert found["gradient_clipping"] == 0.7
    assert found["train_micro_batch_size_per_gpu"] == found["gradient_accumulation_steps"] == 1
    assert "optimizer" not in found and "scheduler" not in found and "fp16" not in found
    assert "offload_optimizer" not in found["zero_optimization"]


@pytest.mark.parametrize(("dtype", "enabled"), [("float32", False), ("bfloat16", True)])
def test_the_models_type_is_deepspeeds(dtype: str, enabled: bool) -> None:
    assert deepspeed_config(config(Path(), dtype=dtype))["bf16"] == {"enabled": enabled}


def test_gradients_are_added_in_float32_and_so_stage_0_is_deepspeeds_stage_1_in_bfloat16() -> None:
    found = deepspeed_config(config(Path(), dtype="bfloat16", learner={"zero_stage": 0}))
    assert found["zero_optimization"]["stage"] == 1
    assert (found["data_types"], found["communication_data_type"]) == ({"grad_accum_dtype": "fp32"}, "fp32")


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_offload_is_to_the_host_with_torchs_own_optimizer(zero_stage: int) -> None:
    found = settings(zero_stage=zero_stage, offload_optimizer=True)
    assert found["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert found["zero_force_ds_cpu_optimizer"] is False


def test_offload_in_stage_0_is_refused_with_the_mend() -> None:
    with pytest.raises(ConfigError, match=r"learner.*offload_optimizer needs zero_stage 1, 2 or 3"):
        settings(zero_stage=0, offload_optimizer=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_optimizer_has_seen_no_step_and_has_our_rates(tiny_model: Any, zero_stage: int, dtype: str) -> None:
    """DeepSpeed's own step of zero gradient, stage 0 in bfloat16, would decay weights and count in Adam's bias."""
    ranks.join(timeout_s=60)
    learner = {"zero_stage": zero_stage, "lr": 0.5, "weight_decay": 0.5, "betas": (0.8, 0.9)}
    model = tiny_model.to(getattr(torch, dtype))
    square_sum = sum(float(weight.double().square().sum()) for weight in model.parameters())
    engine = start_engine(model, config(Path(), dtype=dtype, learner=learner))
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    assert all(float(state["step"]) == 0 for state in inner.state.values() if "step" in state)
    group = inner.param_groups[0]
    assert (group["lr"], group["weight_decay"], tuple(group["betas"])) == (0.5, 0.5, (0.8, 0.9))
    masters = [weight for weight in group["params"] if weight.numel()]
    if zero_stage < 3:  # in stage 3 they lie elsewhere until a step
        assert sum(float(one.double().square().sum()) for one in masters) == pytest.approx(square_sum, rel=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_offloaded_states_lie_in_host_memory(tiny_model_dir: Path, tiny_model: Any, zero_stage: int) -> None:
    learner = Learner(config(tiny_model_dir, learner={"zero_stage": zero_stage, "offload_optimizer": True}))
    learner.step(batch(mixed_groups(tiny_model)))
    states = learner.engine.optimizer.optimizer.state
    assert next(learner.model.parameters()).device.type == "cuda"
    tensors = [value for weight, state in states.items() for value in (weight, *state.values())]
    assert tensors and {tensor.device.type for tensor in tensors} == {"cpu"}
