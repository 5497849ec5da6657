"""Low-rank adapters on the policy, through PEFT: adding them, merging them, and which weights have one.

Independent of gradients, DeepSpeed and weight transfer.
Shapes: O and I sizes of a linear map, R the adapter's rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.config import LoraConfig
from agentrl.engine.vllm.changes import merged
from agentrl.errors import ConfigError, MissingDependencyError

ADAPTER = "default"  # PEFT's name of the only adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What is added to one weight: scale * B A. `adapter.merged(weight)` adds it."""

    down_RI: Tensor  # PEFT's lora_A
    up_OR: Tensor  # PEFT's lora_B
    scale: float

    def merged(self, weight_OI: Tensor) -> Tensor:
        """W + scale * B A, in float32. A new tensor [O, I]. ZeRO-3 must not have divided any of the three."""
        return merged(weight_OI, down_RI=self.down_RI, up_OR=self.up_OR, scale=self.scale)

    def copied(self) -> Adapter:
        """A copy on the CPU."""
        down_RI, up_OR = (tensor.detach().to("cpu", copy=True) for tensor in (self.down_RI, self.up_OR))
        return Adapter(down_RI=down_RI, up_OR=up_OR, scale=self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor under its name in Hugging Face layout, with the adapter to be added to it."""

    name: str
    tensor: Tensor
    adapter: Adapter | None = None


def with_adapters(model: Any, config: LoraConfig) -> Any:
    """`model` as a `PeftModel`: every weight frozen, and a new adapter, which adds zero, on each targeted linear layer.

    Raises ConfigError for targets that do not exist or cannot be trained exactly; MissingDependencyError without PEFT.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(
            f"model.lora needs PEFT where the learner runs: pip install peft ({error})"
        ) from error
    targets = config.target_modules
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    try:
        # In the model's own dtype: DeepSpeed keeps float32 copies of trained weights.
        result = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules: {error}") from error
    _check_targets(result)
    return result


def save(model: Any, adapters: dict[str, Adapter], folder: Path) -> None:
    """Write `adapters`, by the names of their weights, as a folder that PEFT can load. They must be whole."""
    from safetensors.torch import save_file

    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, adapter in adapters.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{layer}.lora_A.weight"] = adapter.down_RI
        tensors[f"{layer}.lora_B.weight"] = adapter.up_OR
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = copy.copy(model.peft_config[ADAPTER])
    settings.inference_mode = True
    settings.save_pretrained(folder)


@contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """Inside, adapters change their layers' outputs; afterwards they are bit-identical to before.

    A new adapter adds zero and every gradient of its A is zero, so it could not be tested. Weights must not be divided.
    """
    layers = [layer for _, layer in _adapted_layers(base_of(model))] if is_adapted(model) else []
    adapters = [_adapter_of(layer) for layer in layers]
    before = [adapter.up_OR.detach().clone() for adapter in adapters]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for adapter in adapters:
            rank = adapter.up_OR.shape[1]
            noise_OR = torch.randn(adapter.up_OR.shape, generator=generator)
            adapter.up_OR.copy_(noise_OR * (0.3 / (adapter.scale * math.sqrt(rank))))
    try:
        yield
    finally:
        with torch.no_grad():
            for adapter, up_OR in zip(adapters, before, strict=True):
                adapter.up_OR.copy_(up_OR)


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as its base model does.

    By a scale of 0 and not by PEFT's `disable_adapter`, which leaves the adapters' modules out: ZeRO-3 gathers weights
    in the order of the modules that it saw before.
    """
    layers = [layer for _, layer in _adapted_layers(base_of(model))]
    scales = [layer.scaling[ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[ADAPTER] = scale


def is_adapted(module: nn.Module) -> bool:
    """Whether the module came from `with_adapters`."""
    return hasattr(module, "peft_config")


def base_of(module: Any) -> Any:
    """The transformers model that PEFT wraps; the module itself if it is not wrapped."""
    return module.get_base_model() if is_adapted(module) else module


def base_tensors(module: nn.Module) -> Iterator[NamedTensor]:
    """Parameters and persistent buffers under the base model's names, in its own order; a tied tensor comes once."""
    base = base_of(module)
    layers = dict(_adapted_layers(base)) if is_adapted(module) else {}
    seen: set[int] = set()
    for name, tensor in base.state_dict(keep_vars=True).items():
        owner = next((layer for layer in _owners(name) if layer in layers), None)
        if id(tensor) in seen or (owner is not None and not name.startswith(f"{owner}.base_layer.")):
            continue
        seen.add(id(tensor))
        adapter = _adapter_of(layers[owner]) if owner is not None and name.endswith(".weight") else None
        yield NamedTensor(name=name.replace(".base_layer.", ".") if owner else name, tensor=tensor, adapter=adapter)


def _owners(name: str) -> Iterator[str]:
    """`a.b` and `a` of `a.b.c`."""
    while name := name.rpartition(".")[0]:
        yield name


def _adapted_layers(base: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    yield from ((name, module) for name, module in base.named_modules() if isinstance(module, BaseTunerLayer))


def _adapter_of(layer: Any) -> Adapter:
    return Adapter(
        down_RI=layer.lora_A[ADAPTER].weight, up_OR=layer.lora_B[ADAPTER].weight, scale=float(layer.scaling[ADAPTER])
    )


def _check_targets(model: Any) -> None:
    base = model.get_base_model()
    head = base.get_output_embeddings()
    for name, layer in _adapted_layers(base):
        if layer is head:
            raise ConfigError(
                f"model.lora.target_modules: {name} is the output head, whose log-probabilities are computed in chunks "
                "without an adapter; remove it from the list"
            )
        if type(layer.get_base_layer()) is not nn.Linear:
            kind = type(layer.get_base_layer()).__name__
            raise ConfigError(
                f"model.lora.target_modules: {name} is not a linear layer but {kind}; remove it from the list"
            )
