"""Squared norms and sums over many float32 numbers, within error bounds that hold on every processor.

A plain float32 sum has no such bound: once the partial sum is large, small terms are rounded away, and how many
partial sums there are depends on the processor's kernel. Independent of models and of what the tensors mean.
Shapes: _R rows, _N elements of a row.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

BLOCK = 32
"""Elements that are added in float32. Divides the size of nearly every weight."""

CPU_CHUNK = 2**20
"""Elements at a time, so that temporary tensors stay in the cache: twice as fast on a large tensor."""

RELATIVE_ERROR = (BLOCK + 2) * 2.0**-24
"""Largest relative error of a squared norm, 2.03e-6; of a norm half of it."""


def squared_norm(tensor: Tensor) -> Tensor:
    """sum x^2 of a float32 tensor of any shape. A float64 scalar within `RELATIVE_ERROR` of the exact value.

    >>> float(squared_norm(torch.tensor([3.0, 4.0])))
    25.0
    """
    flat = tensor.detach().reshape(-1)
    if not flat.is_cpu or len(flat) <= CPU_CHUNK:
        return row_squared_norms(flat[None])[0]
    return torch.cat([row_squared_norms(chunk[None]) for chunk in torch.split(flat, CPU_CHUNK)]).sum()


def row_squared_norms(rows_RN: Tensor) -> Tensor:
    """sum x^2 of each row of a float32 matrix. float64 [R], within `RELATIVE_ERROR` of the exact values.

    Each block of 32 elements has its norm taken in float32; the squares of these norms are added in float64.

    The bound, with u = 2^-24 (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., sections 3.1 and 4.2):
    32 products and 31 additions in float32 are off by at most 32 u in whatever order a kernel makes them, since no term
    is negative; the square root by u, which is 2 u of its square. A sum of such terms is no further off than each of
    them: 34 u. The float64 sum of n/32 terms adds n/32 * 2^-53 at most, 4e-9 for a billion elements.

    The bound needs squares within float32's normal range. An element beyond 1.8e19 makes the result infinite, elements
    below 1e-19 count less than they should, or not at all; NaN and infinities stay what they are.
    """
    blocks, rest_RN = _in_blocks(rows_RN.float())
    total_R: Tensor = torch.linalg.vector_norm(
        torch.linalg.vector_norm(blocks, dim=-1), dim=-1, dtype=torch.float64
    ).square()
    return total_R + rest_RN.double().square().sum(dim=-1) if rest_RN.shape[-1] else total_R


def row_sums(rows_RN: Tensor) -> Tensor:
    """sum x of each row of a float32 matrix. float64 [R], off by at most 31 * 2^-24 * sum |x|.

    Blocks of 32 elements are added in float32, their sums in float64.

    >>> row_sums(torch.ones(2, 100)).tolist()
    [100.0, 100.0]
    """
    blocks, rest_RN = _in_blocks(rows_RN)
    return blocks.sum(dim=-1).double().sum(dim=-1) + rest_RN.double().sum(dim=-1)


def _in_blocks(rows_RN: Tensor) -> tuple[Tensor, Tensor]:
    """[R, N // 32, 32] and the columns that are left over, both views."""
    num_rows, num_blocks = rows_RN.shape[0], rows_RN.shape[1] // BLOCK
    whole = num_blocks * BLOCK
    return rows_RN[:, :whole].view(num_rows, num_blocks, BLOCK), rows_RN[:, whole:]


def inner_product(left: Tensor, right: Tensor) -> Tensor:
    """sum x y of two float32 tensors of one shape. A float64 scalar.

    Products are rounded to float32 and added in float64: off by at most 2^-24 * sum |x y|.

    >>> float(inner_product(torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])))
    1.0
    """
    return (left * right).sum(dtype=torch.float64)


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Norm of all tensors taken together, within half of `RELATIVE_ERROR`. A float64 scalar; 0 without any tensor.

    >>> float(total_norm([torch.tensor([3.0]), torch.tensor([4.0])]))
    5.0
    """
    squares = [squared_norm(tensor) for tensor in tensors]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)
