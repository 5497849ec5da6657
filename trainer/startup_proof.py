"""Proves at start, on short texts, that the model's packed log-probabilities and per-trajectory gradients are exact.

An architecture with an unsupported feature is refused by name instead of being trained wrongly. Runs on the model that
will be trained, before weights are divided among ranks. Besides the weights it takes one float32 sum of their size:
autograd's gradients are subtracted from it and dropped as they appear, and the gradients by trajectory are added to the
same sum, which should then be zero. Independent of episodes and DeepSpeed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.errors import ConfigError
from trainer import lora, packing, ranks
from trainer.gradient import attention
from trainer.gradient.logit_rule import logit_rule
from trainer.gradient.logprobs import score
from trainer.gradient.norms import squared_norm, total_norm
from trainer.gradient.recorded_modules import check_modules, forwards, recording, tied_weight
from trainer.gradient.recorder import Recorder
from trainer.gradient.sums import GradientSums
from trainer.packing import ActionTensors

log = logging.getLogger(__name__)

# Largest |packed - unpacked| log-probability in nats; largest relative error of score norms and of the gradient sum.
LOGPROB_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.25}
GRADIENT_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_LENGTHS = ((9, 4), (5, 1), (17, 8))  # tokens, and how many of the last are actions
_COEFFICIENTS = (1.0, -0.5, 2.0)


def prepare(model: Any, *, is_recorded: bool = True) -> None:
    """Make `model` attend within segments only, and prove that this changes nothing.

    Where nothing is recorded, a model that cannot do so keeps its own attention: each trajectory then has a pack of its
    own (`attention.is_installed`).

    Args:
        is_recorded: prove gradients by trajectory and their norms too, as recorders make them; else the gradient that
            autograd makes of a pack.

    Raises ConfigError, naming the class, if a module or the attention cannot be treated exactly, or if the results
    differ from the model's own log-probabilities or from autograd's gradients.
    """
    check_modules(model, is_recorded=is_recorded)
    with lora.perturbed(model):
        _install(model, partial(_prove, model, is_recorded=is_recorded), may_be_alone=not is_recorded)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # an engine on the same GPU, and DeepSpeed's large buffers, need it whole


def prepare_frozen(model: Any) -> None:
    """The same for a model that is only scored: its log-probabilities are proven, and no gradient.

    Raises ConfigError, naming the class, where they differ from the model's own.
    """
    check_modules(model, is_recorded=False)
    _install(model, partial(_prove_scores, model), may_be_alone=True)


def _install(model: Any, prove: Callable[[], None], *, may_be_alone: bool) -> None:
    """Give the model an attention for packs, or leave it its own, whichever can be proven."""
    attention.check_positions(model)
    logit_rule(model)
    loaded = model.config._attn_implementation
    try:
        attention.check_layers(model)
        attention.install(model)
        prove()
    except ConfigError as error:
        if not may_be_alone or ranks.sequence_count() > 1:
            raise
        _prove_alone(model, loaded, prove, reason=error)


def _prove_alone(model: Any, loaded: str, prove: Callable[[], None], *, reason: ConfigError) -> None:
    """The proof without packs, with the attention that the model was loaded with, or its plainest."""
    for name in dict.fromkeys((loaded, "eager")):
        if not attention.choose_own(model, name):
            continue
        try:
            prove()
        except ConfigError:
            continue
        log.warning(
            "%s; so each episode has a forward of its own, with the model's %s attention: slower than packs where "
            "episodes are short",
            reason,
            name,
        )
        return
    raise reason


def _prove(model: Any, *, is_recorded: bool) -> None:
    """Raise ConfigError if the results differ from those of the model's plainest attention and of autograd."""
    members = _texts(model)
    sums = GradientSums([p for p in model.parameters() if p.requires_grad], has_scores=False)
    sums.reset()
    used = model.config._attn_implementation
    attention.choose_own(model, "eager")  # others leave out what they cannot compute, a soft cap say
    own_N, own_norms = _by_autograd(model, members, sums)
    attention.choose_own(model, used)
    own_norm = total_norm(sums.total)
    with ranks.without_sequence_groups():
        packed_N, norms = (_by_one_pass if is_recorded else _by_plain_pass)(model, members, sums)
    if ranks.sequence_count() > 1:
        packed_N = score(model, packing.join(members)).logprob_N
    difference = total_norm(sums.total) / own_norm
    _compare(model, packed_N, own_N)
    norm_error = 0.0 if norms is None else float((norms - own_norms).norm() / own_norms.norm())
    relative = max(norm_error, float(difference))
    if not relative <= GRADIENT_BOUND[model.dtype]:
        of = "by trajectory" if is_recorded else "of packed episodes"
        raise ConfigError(f"{type(model).__name__}: gradients {of} differ from autograd's by {relative:.2g} (relative)")


@torch.no_grad()
def _prove_scores(model: Any) -> None:
    """Raise ConfigError if log-probabilities differ from those of the model's plainest attention."""
    members = _texts(model)
    used = model.config._attn_implementation
    attention.choose_own(model, "eager")
    own_N = torch.cat([_own_logprobs(model, one) for one in members])
    attention.choose_own(model, used)
    packed = [score(model, packing.join(together)).logprob_N for together in _together(model, members)]
    _compare(model, torch.cat(packed), own_N)


def _compare(model: Any, packed_N: Tensor, own_N: Tensor) -> None:
    error = float((packed_N - own_N).abs().max())
    if not error <= LOGPROB_BOUND[model.dtype]:
        raise ConfigError(
            f"{type(model).__name__}: log-probabilities of packed episodes differ from its own by {error:.2g} nats; "
            "its attention or its logits have a feature that this learner does not support"
        )


def _together(model: Any, members: list[ActionTensors]) -> list[list[ActionTensors]]:
    """The texts of each pack: all, or one where the model cannot be given packs."""
    return [members] if attention.is_installed(model) else [[one] for one in members]


def _texts(model: Any) -> list[ActionTensors]:
    return [_text(model, index, *lengths) for index, lengths in enumerate(_LENGTHS)]


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


def _by_autograd(model: Any, members: list[ActionTensors], sums: GradientSums) -> tuple[Tensor, Tensor]:
    """Log-probabilities and score norms from the model's own logits, text by text; sums -= the weighted gradients.

    The head is computed in float32, like ours: see trainer/gradient/logprobs.py.
    """
    logprobs, norms = [], []
    for member, coefficient in zip(members, _COEFFICIENTS, strict=True):
        logprob_N = _own_logprobs(model, member)
        squares: list[Tensor] = []

        def subtract(index: int, gradient: Tensor, *, by: float = coefficient, to: list[Tensor] = squares) -> None:
            to.append(squared_norm(gradient))
            sums.total[index].sub_(gradient, alpha=by)

        with _each_gradient(sums.parameters, subtract):
            torch.autograd.backward(logprob_N.sum())
        norms.append(torch.stack(squares).sum().sqrt())
        logprobs.append(logprob_N.detach())
    return torch.cat(logprobs), torch.stack(norms)


def _own_logprobs(model: Any, member: ActionTensors) -> Tensor:
    head = model.get_output_embeddings()
    with forwards([(head, _float32_head(head))]):
        logits_SV = model(input_ids=member.input_ids_S[None], use_cache=False).logits[0]
    log_p_NV = logits_SV[member.predictor_N].float().log_softmax(dim=-1)
    logprob_N: Tensor = log_p_NV.gather(1, member.target_N[:, None])[:, 0]
    return logprob_N


def _float32_head(head: Any) -> Callable[[Tensor], Tensor]:
    return lambda hidden: F.linear(
        hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float()
    )


@contextmanager
def _each_gradient(parameters: list[Tensor], take: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside, a backward calls `take` for each parameter's gradient, and drops it."""

    def hook_of(index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            take(index, gradient)

        return hook

    hooks = [
        one.register_post_accumulate_grad_hook(hook_of(index))  # type: ignore[no-untyped-call]
        for index, one in enumerate(parameters)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _by_one_pass(model: Any, members: list[ActionTensors], sums: GradientSums) -> tuple[Tensor, Tensor]:
    """The same from one packed forward and backward; sums += the weighted gradients."""
    pack = packing.join(members)
    recorder = Recorder(
        sums,
        bounds=pack.bounds,
        action_bounds=pack.action_bounds,
        has_norms=True,
        tied_weight=tied_weight(model),
        device=model.device,
    )
    recorder.weigh(ratio_n=_COEFFICIENTS, score_n=[1.0] * len(_COEFFICIENTS))
    with recording(model, recorder):
        logprob_N = score(model, pack, recorder).logprob_N
        torch.autograd.backward(logprob_N, torch.ones_like(logprob_N))
    return logprob_N.detach(), recorder.norm2_n.clamp(min=0).sqrt()


def _by_plain_pass(model: Any, members: list[ActionTensors], sums: GradientSums) -> tuple[Tensor, None]:
    """Log-probabilities from packs, or from single texts; sums += the weighted gradients that autograd makes."""

    def add(index: int, gradient: Tensor) -> None:
        sums.total[index].add_(gradient)

    logprobs, coefficients = [], iter(_COEFFICIENTS)
    for together in _together(model, members):
        pack = packing.join(together)
        logprob_N = score(model, pack, call=model).logprob_N
        seed_N = torch.cat([torch.full_like(one, next(coefficients)) for one in pack.per_segment(logprob_N)])
        with _each_gradient(sums.parameters, add):
            torch.autograd.backward(logprob_N, seed_N)
        logprobs.append(logprob_N.detach())
    return torch.cat(logprobs), None
