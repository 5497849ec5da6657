"""The policy as the learner trains it: loaded from a folder, in its dtype, with adapters or checkpointed layers if set.

Independent of DeepSpeed, gradients and weight transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from agentrl.config import Config
from agentrl.errors import ConfigError
from trainer import lora


def load_model(config: Config) -> Any:
    """The policy in its dtype, in eval mode: dropout would make its log-probabilities differ from the engine's.

    With `model.lora` it is a `PeftModel` of which only the adapters are trained. Raises ConfigError and
    MissingDependencyError.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=getattr(torch, config.model.dtype))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load model.path={config.model.path}: {error}") from error
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"model.path={config.model.path} is an adapter, not a model: use the folder of the merged model"
        )
    if config.model.lora is not None:
        model = lora.with_adapters(model, config.model.lora)
    return model.eval()


def checkpoint_layers(model: Any) -> None:
    """Keep only the layers' inputs and recompute the rest in the backward. Raises ConfigError if that is not supported.

    transformers checkpoints a layer only in training mode. So the flag is set on the layer, and cleared again while the
    layer computes, since some architectures apply dropout in their own code.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"learner.gradient_checkpointing: {error}") from error
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
            module._gradient_checkpointing_func = _in_eval_mode(module, module._gradient_checkpointing_func)


def _in_eval_mode(layer: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """`checkpoint`, with `layer` in eval mode whenever it computes, recomputation included."""

    def checkpointed(call: Callable[..., Any], *inputs: Any) -> Any:
        def computed(*inputs: Any) -> Any:
            layer.training = False
            try:
                return call(*inputs)
            finally:
                layer.training = True

        return checkpoint(computed, *inputs)

    return checkpointed
