"""Proves at start, on short texts, that the model's packed log-probabilities and per-trajectory gradients are exact.

An architecture with an unsupported feature is refused by name instead of being trained wrongly. Runs on the model that
will be trained, before weights are divided among ranks, some of its weights at a time: besides the model it takes one
float32 sum of their size. Autograd's gradients are subtracted from it and dropped as they appear, and the gradients by
trajectory are added to the same sum, which should then be zero. Independent of episodes and DeepSpeed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
PART_ELEMENTS = 2**29
"""Parameters that are proven at a time: their sum takes 2 GiB. A larger weight is a part of its own."""
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
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = [_proven_part(model, part, trained, is_recorded=is_recorded) for part in _parts(trained)]
    own_n = torch.stack([one.own2_n for one in found]).sum(dim=0).sqrt()
    norm_n = torch.stack([one.norm2_n for one in found]).sum(dim=0).sqrt()
    gap = torch.stack([one.gap2 for one in found]).sum() / torch.stack([one.size2 for one in found]).sum()
    relative = max(float((norm_n - own_n).norm() / own_n.norm()), float(gap.sqrt()))
    if not relative <= GRADIENT_BOUND[model.dtype]:
        of = "by trajectory" if is_recorded else "of packed episodes"
        raise ConfigError(f"{type(model).__name__}: gradients {of} differ from autograd's by {relative:.2g} (relative)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What the proof found about some of the weights. float64"""

    own2_n: Tensor  # squared score norm of each text, by autograd
    norm2_n: Tensor  # the same as recorded; by autograd again where nothing is recorded
    size2: Tensor  # squared norm of autograd's weighted gradient
    gap2: Tensor  # of its difference from ours


def _parts(trained: list[Tensor]) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    for parameter in trained:
        if part and sum(one.numel() for one in (*part, parameter)) > PART_ELEMENTS:
            yield part
            part = []
        part.append(parameter)
    yield part


@contextmanager
def _trained_alone(part: list[Tensor], trained: list[Tensor]) -> Iterator[None]:
    """Inside, only the weights of `part` have gradients."""
    inside = {id(parameter) for parameter in part}
    for parameter in trained:
        parameter.requires_grad_(id(parameter) in inside)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _proven_part(model: Any, part: list[Tensor], trained: list[Tensor], *, is_recorded: bool) -> _Part:
    """Raises ConfigError if log-probabilities differ."""
    members = _texts(model)
    sums = GradientSums(part, has_scores=False)
    sums.reset()
    used = model.config._attn_implementation
    attention.choose_own(model, "eager")  # others leave out what they cannot compute, a soft cap say
    with _trained_alone(part, trained):
        own_N, own2_n = _by_autograd(model, members, sums)
    attention.choose_own(model, used)
    size2 = total_norm(sums.total).square()
    with ranks.without_sequence_groups():
        if is_recorded:
            packed_N, norm2_n = _by_one_pass(model, members, sums)
        else:
            with _trained_alone(part, trained):
                packed_N, norm2_n = _by_plain_pass(model, members, sums), own2_n
    if ranks.sequence_count() > 1:
        packed_N = score(model, packing.join(members)).logprob_N.detach()
    _compare(model, packed_N, own_N)
    gap2 = total_norm(sums.total).square()
    return _Part(own2_n=own2_n, norm2_n=norm2_n, size2=size2, gap2=gap2)


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
    """Log-probabilities and squared score norms from the model's own logits, text by text; sums -= the weighted
    gradients.

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
        norms.append(torch.stack(squares).sum())
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
    return logprob_N.detach(), recorder.norm2_n.clamp(min=0)


def _by_plain_pass(model: Any, members: list[ActionTensors], sums: GradientSums) -> Tensor:
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
    return torch.cat(logprobs)
