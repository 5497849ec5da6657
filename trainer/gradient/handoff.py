"""Hands our gradient to DeepSpeed through its own backward, so that it reduces, divides, clips and steps as usual.

Each parameter's sum is given away at the moment autograd asks for that parameter's gradient, so no second copy of all
gradients exists. Independent of how the sums were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.gradient.sums import GradientSums
from trainer.ranks import whole_shape


def hand_over(engine: Any, sums: GradientSums, *, factor: float) -> None:
    """Make `factor` times the sums the gradients of this step. `sums` is empty afterwards.

    DeepSpeed minimizes and averages over ranks, so a `factor` of -(number of ranks) maximizes the sum over ranks.
    """
    with _whole_shapes(sums.parameters):
        loss = torch.zeros((), device=sums.parameters[0].device)
        for index, parameter in enumerate(sums.parameters):
            take = partial(_scaled_sum, sums, index, factor, parameter.dtype)
            loss = loss + _PresetGradient.apply(parameter, take)  # type: ignore[no-untyped-call]
        engine.backward(loss)


@contextmanager
def _whole_shapes(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside, a parameter that ZeRO-3 divided has its whole shape, but no values: it is one element, expanded.

    Autograd refuses a gradient of another shape than the parameter's. It reads no value, so no rank gathers any.
    """
    divided = [parameter for parameter in parameters if parameter.shape != whole_shape(parameter)]
    kept = [parameter.data for parameter in divided]
    for parameter in divided:
        parameter.data = parameter.new_empty(1).expand(whole_shape(parameter))
    try:
        yield
    finally:
        for parameter, data in zip(divided, kept, strict=True):
            parameter.data = data


def held_gradients(engine: Any) -> list[Tensor]:
    """The gradients that a step would now use: this rank's part of them where the stage divides them.

    They are complete after the last backward of a step. Follows DeepSpeed 0.19, whose optimizers keep them in four
    different places.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):  # bfloat16 in stages 0 and 1
        return list(optimizer.fp32_groups_gradients_flat)
    if hasattr(optimizer, "averaged_gradients"):
        if engine.zero_offload_optimizer() is not None:
            stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
            masters = optimizer.fp32_partitioned_groups_flat if stage_3 else optimizer.single_partition_of_fp32_groups
            return [one.grad for one in masters]
        kept = optimizer.averaged_gradients.values()
        return [gradient for group in kept if group for gradient in group if gradient is not None]
    return [one.grad for one in engine.module.parameters() if one.grad is not None]


def discard(engine: Any) -> None:
    """Forget the gradients of this step: the next backward starts with none. Call it in place of `engine.step()`.

    It resets what a step resets in DeepSpeed 0.19, which has no public call for it.
    """
    optimizer = engine.optimizer
    engine.zero_grad()
    optimizer.zero_grad()
    if not hasattr(optimizer, "averaged_gradients"):
        return
    is_offloaded = engine.zero_offload_optimizer() is not None
    if engine.zero_optimization_stage() == 3:  # its zero_grad has reset the count of backwards
        optimizer.averaged_gradients = {}
        # It keeps the weights it gathered for the passes, first of all the embedding's, until a backward of its own
        # follows. Without one they could not be gathered again.
        engine.empty_partition_cache()
    else:
        optimizer.micro_step_id = -1
        optimizer._release_preflattened_grad_buffers()
        for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            kept.update(dict.fromkeys(kept))
        if is_offloaded:
            optimizer._offload_accumulated_param_ids = set()
    if is_offloaded:
        optimizer.reset_cpu_buffers()


def _scaled_sum(sums: GradientSums, index: int, factor: float, dtype: torch.dtype) -> Tensor:
    return sums.take(index).mul_(factor).to(dtype)


class _PresetGradient(torch.autograd.Function):
    """A zero whose gradient with respect to the parameter is what `take` returns."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, take: Any) -> Tensor:
        ctx.take = take
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.take(), None
