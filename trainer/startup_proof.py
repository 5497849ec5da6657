"""Proves at start, on short texts, that the model's packed log-probabilities and per-trajectory gradients are exact.

An architecture with an unsupported feature is refused by name instead of being trained wrongly. Runs on the model that
will be trained, before weights are divided among ranks. Independent of episodes and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from trainer import lora, packing
from trainer.gradient import attention
from trainer.gradient.logprobs import score
from trainer.gradient.norms import total_norm
from trainer.gradient.recorded_modules import check_modules, recording, tied_weight
from trainer.gradient.recorder import Recorder
from trainer.gradient.sums import GradientSums
from trainer.packing import ActionTensors

# Largest |packed - unpacked| log-probability in nats; largest relative error of score norms and of the gradient sum.
LOGPROB_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.25}
GRADIENT_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_LENGTHS = ((9, 4), (5, 1), (17, 8))  # tokens, and how many of the last are actions
_COEFFICIENTS = (1.0, -0.5, 2.0)


def prepare(model: Any) -> None:
    """Make `model` attend within segments only, and prove that this changes nothing.

    Raises ConfigError, naming the class, if a module or the attention cannot be treated exactly, or if the results
    differ from the model's own log-probabilities or from autograd's gradients.
    """
    check_modules(model)
    members = [_text(model, index, *lengths) for index, lengths in enumerate(_LENGTHS)]
    with lora.perturbed(model):
        own_N, own_norms, own_sum = _by_autograd(model, members)
        attention.install(model)
        packed_N, norms, total = _by_one_pass(model, members)
    dtype = model.dtype
    error = float((packed_N - own_N).abs().max())
    if not error <= LOGPROB_BOUND[dtype]:
        raise ConfigError(
            f"{type(model).__name__}: log-probabilities of packed episodes differ from its own by {error:.2g} nats; "
            "its attention or its logits have a feature that this learner does not support"
        )
    relative = max(_relative([norms], [own_norms]), _relative(total, own_sum))
    if not relative <= GRADIENT_BOUND[dtype]:
        raise ConfigError(
            f"{type(model).__name__}: gradients by trajectory differ from autograd's by {relative:.2g} (relative)"
        )


def _relative(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """|ours - theirs| / |theirs|, each taken as one vector."""
    difference = total_norm(mine.flatten() - other.flatten() for mine, other in zip(ours, theirs, strict=True))
    return float(difference / total_norm(theirs))


def _text(model: Any, index: int, num_tokens: int, num_actions: int) -> ActionTensors:
    ids = (torch.arange(num_tokens + 1) * (7 + index) + 3) % model.get_input_embeddings().num_embeddings
    predictor_N = torch.arange(num_tokens - num_actions, num_tokens)
    return ActionTensors(
        input_ids_S=ids[:-1].to(model.device),
        predictor_N=predictor_N.to(model.device),
        target_N=ids[predictor_N + 1].to(model.device),
        behavior_logprob_N=torch.zeros(num_actions, dtype=torch.float64),
        policy_version_N=torch.zeros(num_actions, dtype=torch.int64),
    )


def _by_autograd(model: Any, members: list[ActionTensors]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Log-probabilities, score norms and weighted gradient sum from the model's own logits, text by text."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = [torch.zeros(parameter.numel(), device=parameter.device) for parameter in parameters]
    logprobs, norms = [], []
    for member, coefficient in zip(members, _COEFFICIENTS, strict=True):
        logits_SV = model(input_ids=member.input_ids_S[None], use_cache=False).logits[0]
        log_p_NV = logits_SV[member.predictor_N].float().log_softmax(dim=-1)
        logprob_N = log_p_NV.gather(1, member.target_N[:, None])[:, 0]
        gradients = torch.autograd.grad(logprob_N.sum(), parameters, allow_unused=True, materialize_grads=True)
        norms.append(total_norm(gradients))
        for one, gradient in zip(total, gradients, strict=True):
            one.add_(gradient.flatten(), alpha=coefficient)
        logprobs.append(logprob_N.detach())
    return torch.cat(logprobs), torch.stack(norms), total


def _by_one_pass(model: Any, members: list[ActionTensors]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The same from one packed forward and backward."""
    pack = packing.join(members)
    sums = GradientSums([p for p in model.parameters() if p.requires_grad], has_scores=False)
    sums.reset()
    recorder = Recorder(
        sums,
        bounds=pack.bounds,
        action_bounds=pack.action_bounds,
        has_norms=True,
        tied_weight=tied_weight(model),
        device=model.device,
    )
    recorder.coefficient_n = list(_COEFFICIENTS)
    with recording(model, recorder):
        logprob_N = score(model, pack, recorder).logprob_N
        torch.autograd.backward(logprob_N, torch.ones_like(logprob_N))
    return logprob_N.detach(), recorder.norm2_n.clamp(min=0).sqrt(), sums.total
