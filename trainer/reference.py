"""The frozen second model of an objective: a reference policy, or the teacher of a distillation. Forward passes only.

With `model.lora` and `model.reference: initial` it is the policy itself without its adapters, and takes no memory.
Independent of what the scores are used for, and of DeepSpeed.
Shapes: _N action tokens of one trajectory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from trainer.packing import Pack
from trainer.startup_proof import LOGPROB_BOUND

log = logging.getLogger(__name__)

INITIAL = "initial"
_LENGTHS = [9, 5, 17]  # of the texts that the proof packs


class Reference:
    """Log-probabilities of the policy's action tokens under a frozen model.

    Example::

        reference = load(config, policy)
        logprob_N = reference.logprobs(packing.join([action_tensors(trajectory, device)]))

    Args:
        model: on which `attention.install` was called.
        frozen: inside it `model` is the reference; for a model that never changes it does nothing.
    """

    def __init__(self, model: Any, *, frozen: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._model = model
        self._frozen = frozen

    def logprobs(self, pack: Pack) -> Tensor:
        """log p of each action token of the pack. float64 [N], on the CPU.

        Where ZeRO-3 divides the model's weights every rank must make the same number of calls.
        """
        with torch.no_grad(), self._frozen():
            return score(self._model, pack).logprob_N.cpu().double()


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
    _install(model, path)
    log.info("reference: %s, %.3g parameters, frozen", path, sum(one.numel() for one in model.parameters()))
    return Reference(model)


def is_base_of_adapters(settings: ModelConfig) -> bool:
    """Whether the reference is the policy without its adapters."""
    return settings.reference == INITIAL and settings.lora is not None


def reference_path(settings: ModelConfig) -> str:
    """Folder or hub name of the reference. It must be set."""
    assert settings.reference is not None
    return settings.path if settings.reference == INITIAL else settings.reference


@torch.no_grad()
def _install(model: Any, path: str) -> None:
    """Attend within segments only, and prove that a pack's log-probabilities are the model's own."""
    ids_T = (torch.arange(sum(_LENGTHS), device=model.device) * 7 + 3) % model.get_input_embeddings().num_embeddings
    texts = [packing.all_actions(part_T) for part_T in torch.split(ids_T, _LENGTHS)]
    attention.check_layers(model)
    attention.choose_own(model, "eager")  # others leave out what they cannot compute, a soft cap say
    logits = [model(input_ids=one.input_ids_S[None], use_cache=False).logits[0].float() for one in texts]
    own = [
        log_p_NV.log_softmax(-1).gather(1, one.target_N[:, None])[:, 0]
        for log_p_NV, one in zip(logits, texts, strict=True)
    ]
    attention.install(model)
    packed_N = score(model, packing.join(texts)).logprob_N
    error = float((packed_N - torch.cat(own)).abs().max())
    if not error <= LOGPROB_BOUND[model.dtype]:
        raise ConfigError(
            f"model.reference={path} ({type(model).__name__}): log-probabilities of packed episodes differ from its "
            f"own by {error:.2g} nats; its attention or its logits have a feature that this learner does not support"
        )
