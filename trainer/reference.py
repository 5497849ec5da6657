"""The frozen second model of an objective: a reference policy, or the teacher of a distillation. Forward passes only.

With `model.lora` and `model.reference: initial` it is the policy itself without its adapters, and takes no memory.
Independent of what the scores are used for, and of DeepSpeed.
Shapes: _N action tokens of one trajectory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentrl.config import Config, ModelConfig
from agentrl.errors import ConfigError
from agentrl.tokens.vocabulary import check_same_vocabulary
from trainer import lora, packing
from trainer.gradient import attention
from trainer.gradient.logprobs import score
from trainer.model import pretrained
from trainer.packing import ActionTensors, Pack
from trainer.startup_proof import prepare_frozen

log = logging.getLogger(__name__)

INITIAL = "initial"


class Reference:
    """Log-probabilities of the policy's action tokens under a frozen model.

    Example::

        reference = load(config, policy)
        (logprob_N,) = reference.logprobs([action_tensors(trajectory, device)])

    Args:
        model: on which `startup_proof.prepare_frozen` or `prepare` was called.
        frozen: inside it `model` is the reference; for a model that never changes it does nothing.
    """

    def __init__(self, model: Any, *, frozen: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._model = model
        self._frozen = frozen

    def logprobs(self, texts: Sequence[ActionTensors]) -> list[Tensor]:
        """log p of each action token of each text, which has at least one. float64 [N], on the CPU.

        The texts are one pack, if the model can be given packs. Where ZeRO-3 divides its weights every rank must make
        the same number of calls.
        """
        packs = [texts] if attention.is_installed(self._model) else [[text] for text in texts]
        with torch.no_grad(), self._frozen():
            return [logprob_N for together in packs for logprob_N in self._scored(packing.join(together))]

    def _scored(self, pack: Pack) -> tuple[Tensor, ...]:
        return pack.per_segment(score(self._model, pack).logprob_N.cpu().double())


def load(config: Config, policy: Any) -> Reference | None:
    """The reference that `model.reference` names, on the policy's device and in its type; None where it names none.

    Raises ConfigError if it cannot be loaded, has another vocabulary than the policy, or cannot be scored in packs.
    """
    settings = config.model
    if settings.reference is None:
        return None
    if is_base_of_adapters(settings):
        return Reference(policy, frozen=partial(lora.disabled, policy))
    path = reference_path(settings)
    if path != settings.path:
        check_same_vocabulary(settings.path, path, key="model.reference")
    model = pretrained(path, settings.dtype, key="model.reference").requires_grad_(False).eval().to(policy.device)
    known, sampled = (one.get_output_embeddings().out_features for one in (model, policy))
    if known < sampled:
        raise ConfigError(
            f"model.reference={path} has a head of {known} rows and the policy one of {sampled}: it cannot score an id "
            "from the policy's last rows; give a reference with as many"
        )
    try:
        prepare_frozen(model)
    except ConfigError as error:
        raise ConfigError(f"model.reference={path}: {error}") from error
    log.info("reference: %s, %.3g parameters, frozen", path, sum(one.numel() for one in model.parameters()))
    return Reference(model)


def is_base_of_adapters(settings: ModelConfig) -> bool:
    """Whether the reference is the policy without its adapters."""
    return settings.reference == INITIAL and settings.lora is not None


def reference_path(settings: ModelConfig) -> str:
    """Folder or hub name of the reference. It must be set."""
    assert settings.reference is not None
    return settings.path if settings.reference == INITIAL else settings.reference
