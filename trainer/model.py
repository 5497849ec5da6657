"""The policy as the learner trains it: loaded from a folder, in its dtype, with adapters if set, and what a pass keeps.

For its backward a pass keeps all activations, or the layers' inputs only, in the GPU's or in the host's memory.
Independent of DeepSpeed, gradients and weight transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from agentrl.config import Config, LearnerConfig
from agentrl.errors import ConfigError
from trainer import lora
from trainer.gradient.tiles import tile_mlps


def load_model(config: Config) -> Any:
    """The policy in its dtype, in eval mode: dropout would make its log-probabilities differ from the engine's.

    With `model.lora` it is a `PeftModel` of which only the adapters are trained. Raises ConfigError and
    MissingDependencyError.
    """
    model = pretrained(config.model.path, config.model.dtype, key="model.path")
    if config.model.lora is not None:
        model = lora.with_adapters(model, config.model.lora)
    return model.eval()


def pretrained(path: str, dtype: str, *, key: str) -> Any:
    """The model of a folder or hub name. Raises ConfigError, which names the config's `key`."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load {key}={path}: {error}") from error
    if hasattr(model, "peft_config"):
        raise ConfigError(f"{key}={path} is an adapter, not a model: use the folder of the merged model")
    return model


def keep_activations(model: Any, settings: LearnerConfig) -> None:
    """Make a pass keep for its backward what `settings` say. Raises ConfigError if the model does not support that.

    Example: `keep_activations(model, LearnerConfig(gradient_checkpointing=True, offload_activations=True))`.
    """
    if settings.mlp_tiles > 1:
        tile_mlps(model, settings.mlp_tiles)
    if settings.gradient_checkpointing:
        checkpoint_layers(model, is_offloaded=settings.offload_activations)


def checkpoint_layers(model: Any, *, is_offloaded: bool = False) -> None:
    """Keep only the layers' inputs and recompute the rest in the backward. Raises ConfigError if that is not supported.

    transformers checkpoints a layer only in training mode. So the flag is set on the layer, and cleared again while the
    layer computes, since some architectures apply dropout in their own code.

    Args:
        is_offloaded: the inputs are kept in host memory.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"learner.gradient_checkpointing: {error}") from error
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
            checkpoint = _in_eval_mode(module, module._gradient_checkpointing_func)
            module._gradient_checkpointing_func = _offloaded(checkpoint) if is_offloaded else checkpoint


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


def _offloaded(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """`checkpoint`, with what it keeps in host memory. What the layer computes is under hooks of torch's checkpoint."""

    def checkpointed(call: Callable[..., Any], hidden: Tensor, *others: Any) -> Any:
        with _kept_on_host(hidden.device):
            return checkpoint(call, hidden, *others)

    return checkpointed


def _kept_on_host(device: torch.device) -> AbstractContextManager[Any]:
    if device.type == "meta":  # a pass that trainer/plan/ counts: tensors without values
        return saved_tensors_hooks(
            lambda one: (one.shape, one.dtype), lambda kept: torch.empty(kept[0], dtype=kept[1], device=device)
        )
    return save_on_cpu(pin_memory=device.type == "cuda")
