"""Our gradient as DeepSpeed's: through its own backward, so that it reduces, divides, clips and steps as ever.

Each parameter's sum is given away in the moment autograd asks for that parameter's gradient, so no second copy of all
gradients ever exists. Knows nothing of how the sums came about.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.gradient.score_sums import GradientSums


def hand_over(engine: Any, sums: GradientSums, *, factor: float) -> None:
    """Make `factor` times the sums the gradients of the step; `sums` is empty afterwards.

    DeepSpeed descends and averages over ranks: `factor` -world_size ascends the sum over ranks.
    """
    with _gathered(sums.parameters):
        loss = torch.zeros((), device=sums.parameters[0].device)
        for index, parameter in enumerate(sums.parameters):
            give = partial(_taken, sums, index, factor, parameter.dtype)
            loss = loss + _Given.apply(parameter, give)  # type: ignore[no-untyped-call]
        engine.backward(loss)


def let_go(engine: Any) -> None:
    """In place of `hand_over`, where there will be no step.

    ZeRO-3 holds weights of the estimator's passes, the embedding's first, until the backward of its own that follows;
    without one, nobody could gather them again.
    """
    if engine.zero_optimization_stage() == 3:
        engine.empty_partition_cache()


def _taken(sums: GradientSums, index: int, factor: float, dtype: torch.dtype) -> Tensor:
    return sums.take(index).mul_(factor).to(dtype)


class _Given(torch.autograd.Function):
    """A zero whose gradient by the parameter is what `give` returns."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, give: Any) -> Tensor:
        ctx.give = give
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.give(), None


def _gathered(parameters: list[Tensor]) -> AbstractContextManager[Any]:
    """Under ZeRO-3 autograd must see whole parameters, or it refuses gradients of their shape."""
    if not any(hasattr(parameter, "ds_shape") for parameter in parameters):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters, modifier_rank=None)
    return context
