"""Modules that hand their weights' gradients to a Recorder, piece by piece, inside one backward over a pack.

`recording` lends every trained module of a model another forward for the time of a block. Its output is the module's
own (LayerNorm: to rounding); its backward computes the input's gradient as ever, and the weight's segment by segment.
Autograd itself makes no gradient of a weight, so nothing is accumulated and no hook of a parameter fires. What cannot
be treated exactly is refused by class name. Knows nothing of policies, losses or packs beyond their segments' bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.errors import ConfigError
from trainer.gradient.score_sums import Recorder

# Scale times x / rms(x), the scale outside the conversion to the input's type. Gemma's 1 + w is not among them.
RMS_NORMS = frozenset({"Qwen2RMSNorm", "Qwen3RMSNorm", "LlamaRMSNorm", "MistralRMSNorm", "Phi3RMSNorm"})


def check_modules(model: Any) -> None:
    """Raise ConfigError, naming the class, when a trained weight's gradient cannot be split exactly."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                owners.setdefault(id(parameter), []).append((name, module))
    tied = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    for owning in owners.values():
        for name, module in owning:
            if reason := _unsupported(module):
                raise ConfigError(f"{type(module).__name__} ({name}) {reason}; freeze it, or use another model")
        if len(owning) > 1 and {id(module) for _, module in owning} != tied:
            names = ", ".join(name for name, _ in owning)
            raise ConfigError(f"{type(owning[0][1]).__name__}: {names} share a weight; only a tied head may")
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise ConfigError(f"{type(head).__name__} as output embedding: only a plain matrix is scored exactly")


def tied_weight(model: Any) -> Tensor | None:
    """The weight that input and output embedding share; None where each has its own."""
    weight: Tensor = model.get_input_embeddings().weight
    return weight if weight is model.get_output_embeddings().weight else None


def _unsupported(module: nn.Module) -> str | None:
    """Why the module's weights cannot be treated; None where they can."""
    if type(module) is nn.Linear or _is_norm(module):
        return None
    if type(module) is nn.Embedding:
        is_plain = not (module.sparse or module.scale_grad_by_freq or module.max_norm)
        return None if is_plain else "changes its weights or their gradient while it looks up"
    return "has weights whose gradient cannot be split by trajectory exactly"


def _is_norm(module: nn.Module) -> bool:
    if type(module) is nn.LayerNorm:
        return module.elementwise_affine and len(module.normalized_shape) == 1
    return type(module).__name__ in RMS_NORMS


@contextmanager
def recording(model: Any, recorder: Recorder) -> Iterator[None]:
    """Inside, forwards of `model` are such that their backward fills `recorder`. Forward *and* backward belong inside.

    A recorder without sums is given the scales of normalisation layers alone, whether they are trained or not.
    The output embedding is left to trainer/gradient/logprobs.py.
    """
    # Gives the first trained module something to be differentiated by; its own gradient is never made.
    anchor = torch.zeros((), requires_grad=True, device=recorder.device)
    head = model.get_output_embeddings()
    wanted = [module for module in model.modules() if module is not head and _is_wanted(module, recorder)]
    with forwards((module, _lent_forward(module, recorder, anchor)) for module in wanted):
        yield


@contextmanager
def forwards(lent: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Replace modules' own forwards for the time of a block."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module, forward in lent:
            before.append((module, module.__dict__.get("forward")))
            module.forward = forward
        yield
    finally:
        for module, own in before:
            if own is None:
                del module.forward
            else:
                module.forward = own


def _is_wanted(module: nn.Module, recorder: Recorder) -> bool:
    is_trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return is_trained or (recorder.has_only_vectors and _is_norm(module))


def _lent_forward(module: nn.Module, recorder: Recorder, anchor: Tensor) -> Callable[[Tensor], Tensor]:
    if type(module) is nn.Linear:
        return lambda input: _Linear.apply(input, anchor, module, recorder)  # type: ignore[no-untyped-call]
    if type(module) is nn.Embedding:
        return lambda input: _Embedding.apply(input, anchor, module, recorder)  # type: ignore[no-untyped-call]
    if type(module) is nn.LayerNorm:
        return lambda input: _layer_norm(input, anchor, module, recorder)
    # Kernels of transformers' hub name their argument alike in all these classes.
    return lambda hidden_states: _RMSNorm.apply(hidden_states, anchor, module, recorder)  # type: ignore[no-untyped-call]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _Linear(torch.autograd.Function):
    """y = x W^T + b."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, anchor: Tensor, module: nn.Linear, recorder: Recorder) -> Tensor:
        # The weight is asked of its module again in the backward: ZeRO-3 gathers and drops it in between.
        ctx.module, ctx.recorder = module, recorder
        ctx.save_for_backward(input)
        return F.linear(input, module.weight, module.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (input,) = ctx.saved_tensors
        module, recorder = ctx.module, ctx.recorder
        recorder.linear(module.weight, _rows(grad), _rows(input))
        if module.bias is not None and not recorder.has_only_vectors:
            recorder.vectors(module.bias, _rows(grad))
        return grad @ module.weight if ctx.needs_input_grad[0] else None, None, None, None


class _Embedding(torch.autograd.Function):
    """Rows of the weight."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, anchor: Tensor, module: nn.Embedding, recorder: Recorder) -> Tensor:
        ctx.module, ctx.recorder = module, recorder
        ctx.save_for_backward(ids)
        return F.embedding(ids, module.weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.recorder.embedding(ctx.module.weight, ids.reshape(-1), _rows(grad), ctx.module.padding_idx)
        return None, None, None, None


class _RMSNorm(torch.autograd.Function):
    """w * x / sqrt(mean(x^2) + eps), in float32 up to the multiplication by w, as transformers computes it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, anchor: Tensor, module: Any, recorder: Recorder) -> Tensor:
        ctx.module, ctx.recorder = module, recorder
        wide = input.float()
        inverse_rms = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        ctx.save_for_backward(input, inverse_rms)
        output: Tensor = module.weight * (wide * inverse_rms).to(input.dtype)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        input, inverse_rms = ctx.saved_tensors
        normal = input.float() * inverse_rms
        scale_grad = grad * normal.to(grad.dtype)
        ctx.recorder.vectors(ctx.module.weight, _rows(scale_grad))
        normal_grad = (grad * ctx.module.weight).float()
        along = (normal_grad * normal).mean(-1, keepdim=True)
        return ((normal_grad - normal * along) * inverse_rms).to(input.dtype), None, None, None


class _Affine(torch.autograd.Function):
    """w * x + b, element by element."""

    @staticmethod
    def forward(ctx: Any, normal: Tensor, anchor: Tensor, module: nn.LayerNorm, recorder: Recorder) -> Tensor:
        ctx.module, ctx.recorder = module, recorder
        ctx.save_for_backward(normal)
        output = normal * module.weight
        return output if module.bias is None else output + module.bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (normal,) = ctx.saved_tensors
        ctx.recorder.vectors(ctx.module.weight, _rows(grad * normal))
        if ctx.module.bias is not None and not ctx.recorder.has_only_vectors:
            ctx.recorder.vectors(ctx.module.bias, _rows(grad))
        return grad * ctx.module.weight, None, None, None


def _layer_norm(input: Tensor, anchor: Tensor, module: nn.LayerNorm, recorder: Recorder) -> Tensor:
    normal = F.layer_norm(input, module.normalized_shape, eps=module.eps)
    output: Tensor = _Affine.apply(normal, anchor, module, recorder)  # type: ignore[no-untyped-call]
    return output
