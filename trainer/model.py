"""The policy as the learner trains it: loaded from a folder, in its dtype, with adapters if set.

Independent of DeepSpeed, gradients and weight transfer.
"""

from __future__ import annotations

from typing import Any

import torch

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
