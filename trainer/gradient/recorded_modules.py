"""Modules that pass their weights' gradients to a Recorder, segment by segment, inside one backward over a pack.

`recording` replaces the forward of every trained module of a model inside a block. The output is the module's own
(LayerNorm: to rounding); the backward computes the input's gradient as usual, and the weight's segment by segment.
Autograd itself makes no gradient of a weight, so nothing is accumulated and no parameter hook runs. Modules that cannot
be treated exactly are refused by class name. Independent of policies and losses; of a pack only the bounds are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.errors import ConfigError
from trainer.gradient.recorder import Recorder
from trainer.gradient.tiles import Tiled

# These multiply x / rms(x) by the scale after converting it to the input's type. Gemma's 1 + w is none of them.
RMS_NORMS = frozenset({"Qwen2RMSNorm", "Qwen3RMSNorm", "LlamaRMSNorm", "MistralRMSNorm", "Phi3RMSNorm"})


def check_modules(model: Any, *, is_recorded: bool = True) -> None:
    """Raise ConfigError, naming the class, if a trained weight's gradient cannot be split by segment exactly.

    Where nothing is recorded only the output head's class matters.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or (is_recorded and head.bias is not None):
        wanted = "a plain matrix without bias" if is_recorded else "a plain matrix"
        raise ConfigError(f"{type(head).__name__} as output embedding: only {wanted} is supported")
    if not is_recorded:
        return
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                owners.setdefault(id(parameter), []).append((name, module))
    tied = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    for owning in owners.values():
        for name, module in owning:
            if reason := _unsupported(module):
                raise ConfigError(
                    f"{type(module).__name__} ({name}) {reason}: no score norms; freeze it, or use a preset without "
                    "norms (algorithm.preset: grpo), which trains any architecture"
                )
        if len(owning) > 1 and {id(module) for _, module in owning} != tied:
            names = ", ".join(name for name, _ in owning)
            raise ConfigError(f"{type(owning[0][1]).__name__}: {names} share a weight; only a tied head may")


def tied_weight(model: Any) -> Tensor | None:
    """The weight that input and output embedding share; None where each has its own."""
    weight: Tensor = model.get_input_embeddings().weight
    return weight if weight is model.get_output_embeddings().weight else None


def _unsupported(module: nn.Module) -> str | None:
    """Why the module's weights cannot be treated; None if they can."""
    if type(module) is nn.Linear or _is_norm(module):
        return None
    if type(module) is nn.Embedding:
        is_plain = not (module.sparse or module.scale_grad_by_freq or module.max_norm)
        return None if is_plain else "changes its weights or their gradient in a look-up"
    return "has weights whose gradient cannot be split by trajectory exactly"


def _is_norm(module: nn.Module) -> bool:
    if type(module) is nn.LayerNorm:
        return module.elementwise_affine and len(module.normalized_shape) == 1
    return type(module).__name__ in RMS_NORMS


@contextmanager
def recording(model: Any, recorder: Recorder) -> Iterator[None]:
    """Inside, a backward through `model` fills `recorder`. Both forward and backward belong into the block.

    A recorder without sums receives the scales of normalization layers only, whether they are trained or not. The
    output embedding is handled by trainer/gradient/logprobs.py.
    """
    # An input that requires a gradient, so that autograd calls the first module's backward. Its gradient is never made.
    anchor = torch.zeros((), requires_grad=True, device=recorder.device)
    head = model.get_output_embeddings()
    wanted = [module for module in model.modules() if module is not head and _is_wanted(module, recorder)]
    recorded = [(module, _recorded_forward(module, recorder, anchor)) for module in wanted]
    untiled = [(module, one.whole) for module in model.modules() if isinstance(one := module.forward, Tiled)]
    with forwards([*recorded, *untiled]):
        yield


@contextmanager
def forwards(replacements: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Replace modules' forwards inside the block."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module, forward in replacements:
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


def _recorded_forward(module: nn.Module, recorder: Recorder, anchor: Tensor) -> Callable[[Tensor], Tensor]:
    if type(module) is nn.Linear:
        return lambda input: _Linear.apply(input, anchor, module, recorder)  # type: ignore[no-untyped-call]
    if type(module) is nn.Embedding:
        return lambda input: _Embedding.apply(input, anchor, module, recorder)  # type: ignore[no-untyped-call]
    if type(module) is nn.LayerNorm:
        return lambda input: _layer_norm(input, anchor, module, recorder)
    # All these classes name their argument hidden_states, and kernels of transformers' hub pass it by name.
    return lambda hidden_states: _RMSNorm.apply(hidden_states, anchor, module, recorder)  # type: ignore[no-untyped-call]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _Linear(torch.autograd.Function):
    """y = x W^T + b."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, anchor: Tensor, module: nn.Linear, recorder: Recorder) -> Tensor:
        # The module is kept and not its weight: ZeRO-3 drops the weight after the forward and gathers it again.
        ctx.module, ctx.recorder, ctx.source = module, recorder, recorder.source_of(input)
        ctx.save_for_backward(input)
        return F.linear(input, module.weight, module.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (input,) = ctx.saved_tensors
        module, recorder = ctx.module, ctx.recorder
        recorder.linear(module.weight, _rows(grad), _rows(input), ctx.source)
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
