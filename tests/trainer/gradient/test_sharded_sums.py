"""Sums divided among ranks against whole ones: two ranks, here as threads; as processes in equality.py."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from trainer.gradient.sharded_sums import ShardedSums
from trainer.gradient.sums import GradientSums

SHAPES = [(5, 3), (4,), (2, 2)]  # the first is divided into parts of 8, 7 elements; the last is small
SMALL = 4
ROWS = torch.tensor([4, 1])
SHIFTS = [0.25, -1.5]


class Exchange:
    """The reduce-scatter of two threads."""

    def __init__(self) -> None:
        self._given: list[Tensor | None] = [None, None]
        self._barrier = threading.Barrier(2, timeout=20)

    def scatter(self, rank: int, whole: Tensor) -> Tensor:
        self._given[rank] = whole
        self._barrier.wait()
        total = sum(one for one in self._given if one is not None)
        assert isinstance(total, Tensor)
        part = torch.chunk(total, 2)[rank].clone()
        self._barrier.wait()
        return part


def make_step(sums: GradientSums, shares: list[int]) -> list[Tensor]:
    """Two groups of three segments on each rank, of which the ranks in `shares` are added."""
    sums.reset()
    generator = torch.Generator().manual_seed(0)
    for shift in SHIFTS:
        for rank in range(2):
            pieces = [torch.randn(3, *shape, generator=generator) for shape in SHAPES]
            factor_n = torch.rand(3, generator=generator).tolist()
            if rank not in shares:
                continue
            for n, factor in enumerate(factor_n):
                sums.add(0, pieces[0][n], ratio=n - 1.5, score=factor)
                sums.add_rows(0, ROWS, pieces[0][n][:2], torch.tensor([[-factor] * 2, [factor] * 2]))
                sums.add(2, pieces[2][n], ratio=float(n), score=factor)
            coefficient_n = [factor * (n - 1.5) for n, factor in enumerate(factor_n)]
            sums.add_weighted(1, pieces[1], torch.tensor([coefficient_n, factor_n]))
        for index in range(3):
            sums.finish(index)
        sums.close_group(shift)
    return [sums.take(index) for index in range(3)]


def test_parts_of_two_ranks_add_up_to_the_whole_sums() -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    whole = make_step(GradientSums(parameters, has_scores=True), [0, 1])
    exchange = Exchange()

    def on(rank: int) -> tuple[list[Tensor], list[torch.Size]]:
        sums = ShardedSums(
            parameters, rank=rank, num_ranks=2, scatter=lambda whole: exchange.scatter(rank, whole), small=SMALL + 1
        )
        sums.reset()
        shapes = [one.shape for one in sums.present]
        return make_step(sums, [rank]), shapes

    with ThreadPoolExecutor(2) as pool:
        (first, shapes), (second, _) = pool.map(on, range(2))
    assert [tuple(shape) for shape in shapes] == [(8,), (4,), (2, 2)] * 2  # total, scores: half of the large weight
    for mine, other, expected in zip(first, second, whole, strict=True):
        torch.testing.assert_close(mine + other, expected, rtol=1e-5, atol=1e-6)
    assert not bool((first[0].flatten()[8:]).any()) and not bool(second[0].flatten()[:8].any())


def test_a_rank_without_a_piece_takes_part_in_the_exchange() -> None:
    calls: list[int] = []

    def scatter(whole: Tensor) -> Tensor:
        calls.append(len(whole))
        return whole[:8]

    sums = ShardedSums([nn.Parameter(torch.zeros(5, 3))], rank=0, num_ranks=2, scatter=scatter, small=0)
    sums.reset()
    sums.finish(0)
    sums.close_group(0.5)
    assert calls == [16, 16]
    assert not sums.take(0).any()
