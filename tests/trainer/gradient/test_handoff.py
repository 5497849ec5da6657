"""The hand-off of sums to DeepSpeed as gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer.gradient.handoff import hand_over
from trainer.gradient.sums import GradientSums


class PlainEngine:
    """Like DeepSpeed's stage 0, without DeepSpeed: gradients stay on the parameters."""

    def backward(self, loss: Any) -> None:
        loss.backward()


def test_sums_become_gradients_without_a_copy() -> None:
    parameters = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(4))]
    sums = GradientSums(parameters, has_scores=False)
    sums.reset()
    torch._foreach_add_(sums.total, 2.0)
    memory = [total.data_ptr() for total in sums.total]
    hand_over(PlainEngine(), sums, factor=-2.0)
    assert [p.grad.data_ptr() for p in parameters if p.grad is not None] == memory
    assert all(bool((p.grad == -4).all()) for p in parameters if p.grad is not None)
    assert all(total.numel() == 0 for total in sums.total)


def test_gradients_have_their_parameters_type() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    sums = GradientSums([parameter], has_scores=False)
    sums.reset()
    sums.total[0].fill_(1.0)
    hand_over(PlainEngine(), sums, factor=1.0)
    assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16


def test_after_it_the_sums_start_anew() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    sums = GradientSums([parameter], has_scores=True)
    sums.reset()
    sums.total[0].fill_(1.0)
    hand_over(PlainEngine(), sums, factor=1.0)
    sums.reset()
    assert sums.total[0].tolist() == [0.0, 0.0, 0.0]
