"""Squared norms within their derived bound, on data that a long float32 sum gets wrong on every processor."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trainer.gradient.norms import BLOCK, RELATIVE_ERROR, inner_product, squared_norm, total_norm
from trainer.gradient.recorder import Recorder
from trainer.gradient.sums import GradientSums

HALF_AN_ULP_OF_ONE = 2.0**-24


def relative_error(tensor: Tensor) -> float:
    """Relative error against the sum of exact squares, rounded once."""
    exact = math.fsum(x * x for x in tensor.double().flatten().tolist())
    return abs(float(squared_norm(tensor)) / exact - 1)


def large_first_then_small(num_large: int, num_small: int) -> Tensor:
    """Squares of 1 followed by squares of half an ulp of 1: added to a float32 of 1 or more, none of these counts."""
    small = torch.full((num_small,), HALF_AN_ULP_OF_ONE**0.5 * 0.99)
    return torch.cat([torch.ones(num_large), small])


def test_small_elements_after_large_ones_all_count() -> None:
    """1024 or fewer interleaved float32 partial sums are 6e-5 off: each begins with a large one."""
    tensor = large_first_then_small(1024, 2**20 - 1024)
    lost = 1024 / float(tensor.double().square().sum()) - 1
    assert abs(lost) > 20 * RELATIVE_ERROR
    assert relative_error(tensor) < RELATIVE_ERROR


def test_the_worst_block_stays_within_the_bound() -> None:
    """Within a block the small ones may all be rounded away: 31 times half an ulp, the worst there is."""
    block = large_first_then_small(1, BLOCK - 1)
    assert relative_error(block.repeat(5000)) < RELATIVE_ERROR
    assert relative_error(block.flip(0).repeat(5000)) < RELATIVE_ERROR


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 1000, 4096 * 7 + 5])
@pytest.mark.parametrize("spread", [0.0, 8.0])
def test_any_size_and_any_mixture_of_magnitudes(size: int, spread: float) -> None:
    """Magnitudes over `spread` powers of ten each way."""
    generator = torch.Generator().manual_seed(size)
    exponents = (torch.rand(size, generator=generator) * 2 - 1) * spread
    assert relative_error(torch.randn(size, generator=generator) * 10**exponents) < RELATIVE_ERROR


@given(st.lists(st.floats(-1e9, 1e9, width=32), min_size=1, max_size=100).filter(lambda row: max(map(abs, row)) > 1e-9))
def test_whatever_the_elements(row: list[float]) -> None:
    elements = [x if abs(x) > 1e-15 else 0.0 for x in row]
    assert relative_error(torch.tensor(elements)) < RELATIVE_ERROR


def test_the_shape_and_the_layout_do_not_matter() -> None:
    matrix = torch.randn(37, 65, generator=torch.Generator().manual_seed(0))
    exact = float(matrix.double().square().sum())
    for one in (matrix, matrix.t(), matrix[:, ::2], matrix[3:, 5:], torch.tensor(2.0)):
        assert relative_error(one) < RELATIVE_ERROR
    assert float(total_norm([matrix[:10], matrix[10:]])) == pytest.approx(exact**0.5, rel=RELATIVE_ERROR / 2)


def test_bfloat16_is_squared_as_float32() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert relative_error(tensor) < RELATIVE_ERROR


def test_inner_products_of_opposite_signs() -> None:
    """A large product that cancels in the end leaves the small ones whole."""
    left = torch.cat([torch.tensor([2.0**20]), torch.ones(2**20), torch.tensor([-(2.0**20)])])
    right = torch.cat([torch.tensor([2.0**20]), torch.full((2**20,), 3.0), torch.tensor([2.0**20])])
    assert float(inner_product(left, right)) == 3 * 2**20


def test_norms_of_large_weights_are_exact() -> None:
    """|G^T X|^2 = sum (G G^T) * (X X^T), in float64 and without the 17 million elements of the piece."""
    generator = torch.Generator().manual_seed(0)
    grad_SO, input_SI = (torch.randn(2, 4096, generator=generator) for _ in range(2))
    weight = nn.Parameter(torch.zeros(4096, 4096))
    sums = GradientSums([weight], has_scores=False)
    sums.reset()
    recorder = Recorder(
        sums, bounds=(0, 2), action_bounds=(0, 2), has_norms=True, tied_weight=None, device=torch.device("cpu")
    )
    recorder.linear(weight, grad_SO, input_SI, source=0)
    left, right = grad_SO.double(), input_SI.double()
    exact = float(((left @ left.t()) * (right @ right.t())).sum())
    assert abs(float(recorder.norm2_n[0]) / exact - 1) < 2e-6
    assert abs(float(total_norm(sums.total)) / exact**0.5 - 1) < 2e-6


def test_products_of_large_tensors_are_exact() -> None:
    ones = torch.ones(20_000_000)
    assert abs(float(squared_norm(ones)) / 20_000_000 - 1) < RELATIVE_ERROR
    assert float(inner_product(ones, 3 * ones)) == 60_000_000


def test_nothing_has_no_norm_and_what_is_not_finite_has_none_that_is() -> None:
    assert float(total_norm([])) == 0.0
    assert float(squared_norm(torch.zeros(0))) == 0.0
    assert not bool(total_norm([torch.ones(3), torch.tensor([1.0, torch.inf])]).isfinite())
    assert not bool(total_norm([torch.tensor([torch.nan])]).isfinite())
    assert not bool(total_norm([torch.full((BLOCK,), torch.nan)]).isfinite())
