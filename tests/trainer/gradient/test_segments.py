"""Squared norms by segment, from token products and from pieces, and the kernels that they take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.gradient.test_recorded_modules import assert_same, one_pass, single_backwards
from tests.trainer.trainer_builders import architecture
from trainer.gradient import attention, segments
from trainer.gradient.logprobs import score
from trainer.gradient.recorded_modules import recording, tied_weight
from trainer.gradient.recorder import Recorder
from trainer.gradient.segment_weights import SegmentWeights
from trainer.gradient.segments import Segments, batches, longest_by_tokens, lookup_norm2
from trainer.gradient.sums import GradientSums, NoSums
from trainer.packing import Pack

UNIT = 2.0**-24
CPU = torch.device("cpu")


def by_tokens(grad_SO: Tensor, input_SI: Tensor, lengths: list[int]) -> Tensor:
    """Squared norms by token products alone. [n]"""
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    split = Segments(bounds, CPU).split(num_in=10**6, num_out=10**6, has_product=False)
    found = torch.zeros(len(lengths), dtype=torch.float64)
    for batch in split.batches:
        products_mTT = batch.products(grad_SO) * batch.masked_products(input_SI)
        found[list(batch.segments)] = products_mTT.sum(dim=(1, 2), dtype=torch.float64)
    return found


def exact(grad_SO: Tensor, input_SI: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """(|G^T X|^2, (sum_t |g_t| |x_t|)^2) of each segment in float64. [n]"""
    parts = zip(grad_SO.double().split(lengths), input_SI.double().split(lengths), strict=True)
    found = [
        ((grad.t() @ input).square().sum(), (grad.norm(dim=1) * input.norm(dim=1)).sum().square())
        for grad, input in parts
    ]
    norm2, bound = zip(*found, strict=True)
    return torch.stack(norm2), torch.stack(bound)


def rows(num: int, size: int, seed: int, *, shared: float = 0.0) -> Tensor:
    """Random rows, with a common part of `shared` times their size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, size, generator=generator) + shared * torch.randn(size, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [0.0, 30.0])
def test_token_products_are_within_their_bound_and_far_better_in_practice(dtype: torch.dtype, shared: float) -> None:
    """Activations with a large common part, as of real models, and gradients of either sign.

    Over 20 seeds at most 6.5e-7.
    """
    lengths = [300, 1, 7, 300, 64]
    grad_SO, input_SI = rows(672, 96, 0).to(dtype), rows(672, 160, 1, shared=shared).to(dtype)
    ours = by_tokens(grad_SO, input_SI, lengths)
    theirs, parts = exact(grad_SO, input_SI, lengths)
    assert bool(((ours - theirs).abs() <= (96 + 160 + 2) * UNIT * parts).all())
    assert float((ours / theirs - 1).abs().max()) < 5e-6


def test_tokens_that_cancel_stay_within_the_bound() -> None:
    """Pairs of tokens whose pieces cancel up to a thousandth: the error is that of the parts, not of what remains."""
    half_SO, half_SI = rows(100, 64, 0), rows(100, 32, 1)
    grad_SO = torch.cat([half_SO, -half_SO * (1 + 1e-3)])
    input_SI = torch.cat([half_SI, half_SI])
    ours = by_tokens(grad_SO, input_SI, [200])
    theirs, parts = exact(grad_SO, input_SI, [200])
    assert float(theirs / parts) < 1e-8, "nothing cancels"
    assert float((ours - theirs).abs()) <= (64 + 32 + 2) * UNIT * float(parts)
    assert float(ours / theirs) == pytest.approx(1, abs=0.5)


def test_a_nan_stays_in_its_own_segment() -> None:
    grad_SO, input_SI = rows(12, 8, 0), rows(12, 4, 1)
    grad_SO[4], input_SI[11] = torch.nan, torch.inf
    assert by_tokens(grad_SO, input_SI, [3, 4, 4, 1]).isfinite().tolist() == [True, False, True, False]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.floats(1e3, 1e9))
def test_no_other_batches_of_neighbours_in_length_cost_less(lengths: list[int], launch_flop: float) -> None:
    def cost(found: list[list[int]]) -> float:
        return sum(2.0 * 64 * len(one) * max(lengths[i] for i in one) ** 2 + launch_flop for one in found)

    def divisions(order: list[int]) -> Iterator[list[list[int]]]:
        for mask in range(2 ** (len(order) - 1)):
            cuts = [0, *(i + 1 for i in range(len(order) - 1) if mask >> i & 1), len(order)]
            yield [order[start:end] for start, end in pairwise(cuts)]

    found = batches(lengths, 64, launch_flop)
    assert sorted(i for one in found for i in one) == list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    assert cost(found) <= min(map(cost, divisions(order))) * (1 + 1e-12)


def test_the_break_even_follows_the_shape_and_the_device() -> None:
    """T^2 = 8 (F / W) I O / (I + O); without a product to make, 2 T^2 (I + O) = 2 T I O + 8 (F / W) I O."""
    assert longest_by_tokens(512, 512, "cpu", has_product=True) == math.isqrt(8 * 3 * 256)
    alone = longest_by_tokens(512, 512, "cpu", has_product=False)
    assert 2 * alone**2 * 1024 == pytest.approx(2 * alone * 512**2 + 8 * 3 * 512**2, rel=0.01)
    assert longest_by_tokens(4096, 4096, "cuda", has_product=True) > 20 * longest_by_tokens(
        64, 64, "cpu", has_product=True
    )


def test_rows_of_one_id_add_up_within_a_segment() -> None:
    ids_S, grad_SD = torch.tensor([3, 1, 3, 3, 0, 0]), rows(6, 5, 0)
    expected = []
    for at in (slice(0, 3), slice(3, 6)):
        piece_VD = torch.zeros(4, 5).index_add_(0, ids_S[at], grad_SD[at])
        expected.append(float(piece_VD.double().square().sum()))
    assert lookup_norm2(Segments((0, 3, 6), CPU), ids_S, grad_SD, 4).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("balance", [0.0, 1e9], ids=["pieces", "token products"])
@pytest.mark.parametrize("name", ["Qwen3-tied", "Qwen2"])
def test_norms_and_sums_do_not_depend_on_the_way(name: str, balance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(segments.FLOP_PER_BYTE, "cpu", balance)
    model = architecture(name)
    assert_same(one_pass(model), single_backwards(model, torch.float64), 1e-5)


@given(st.lists(st.floats(0, 1) | st.floats(-300, 0).map(lambda x: 10**x), min_size=1, max_size=8))
def test_weights_of_any_spread_are_made_of_seeds_that_float32_can_square(score_n: list[float]) -> None:
    weights = SegmentWeights.of([1.0] * len(score_n), score_n)
    for score_i, scale, seed in zip(score_n, weights.scale_n, weights.seed_n, strict=True):
        assert 2.0**-22 < seed <= 4 or score_i == 0
        assert scale * seed == pytest.approx(score_i, rel=1e-9, abs=1e-320)


NO_KERNEL = ("aten::detach", "aten::empty", "aten::empty_like", "aten::_unsafe_view")


class Launches(TorchDispatchMode):
    """Counts operations, except those that only look at a tensor in another way, and numbers that the host waits for
    (which are 0 here)."""

    num = reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
            return 0
        self.num += not func.is_view and func._schema.name not in NO_KERNEL
        return func(*args, **(kwargs or {}))


def launches(num_layers: int, lengths: list[int], *, has_norms: bool, keeps: bool = True) -> Launches:
    """Of a forward and a backward over one pack, on the meta device, which stands for a GPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=32000, num_hidden_layers=num_layers, **shape)).bfloat16()
    attention.install(model)
    bounds = (0, *torch.tensor(lengths).cumsum(0).tolist())
    ids_S = torch.zeros(bounds[-1], dtype=torch.int64, device="meta")
    pack = Pack(
        input_ids_S=ids_S, position_ids_S=ids_S, bounds=bounds, predictor_N=ids_S, target_N=ids_S, action_bounds=bounds
    )
    parameters = list(model.parameters())
    sums = GradientSums(parameters, has_scores=has_norms) if keeps else NoSums(parameters)
    sums.reset()
    recorder = Recorder(
        sums,
        bounds=bounds if has_norms else (0, bounds[-1]),
        action_bounds=bounds if has_norms else (0, bounds[-1]),
        has_norms=has_norms,
        tied_weight=tied_weight(model),
        device=ids_S.device,
    )
    with Launches() as counted, recording(model, recorder):
        logprob_N = score(model, pack, recorder).logprob_N
        if has_norms:
            half = len(lengths) // 2
            recorder.weigh(ratio_n=[0.0] * half + [1.0] * (len(lengths) - half), score_n=[1.0] * len(lengths))
        torch.autograd.backward(logprob_N, torch.ones_like(logprob_N))
    return counted


def per_layer(lengths: list[int], **way: bool) -> int:
    return launches(2, lengths, **way).num - launches(1, lengths, **way).num


def test_exact_norms_launch_a_third_more_operations_than_none() -> None:
    """A layer of Qwen3 in bfloat16: 166 and 210. As many for 64 segments, and no more numbers that the host reads."""
    plain = per_layer([512] * 16, has_norms=False)
    assert per_layer([512] * 16, has_norms=True) <= 1.3 * plain
    assert per_layer([512] * 64, has_norms=True) == per_layer([512] * 16, has_norms=True)
    assert per_layer([37 * i + 20 for i in range(16)], has_norms=True) <= 1.6 * plain  # two lengths of padding
    reads = [launches(1, [512, 2048, 9], has_norms=has_norms).reads for has_norms in (False, True)]
    assert reads[0] == reads[1] <= 1, "the host waits for the device"


def test_norms_alone_make_no_products() -> None:
    assert per_layer([512] * 16, has_norms=True, keeps=False) < per_layer([512] * 16, has_norms=True) - 35


def test_segments_of_very_different_weight_make_products_of_their_own() -> None:
    weights = SegmentWeights.of([0.5, 0.5, -0.5, 0.5], [1.0, 2.0**-40, 1.0, 0.0])
    assert [list(run.segments) for run in weights.runs] == [[0], [1], [2], [3]]
    assert [run.scale for run in weights.runs] == [1.0, 2.0**-24, 1.0, 0.0]


@pytest.mark.gpu
@pytest.mark.parametrize("has_product", [True, False])
def test_products_in_half_precision_are_accumulated_in_float32(has_product: bool) -> None:
    """Token products and sums on a GPU, against float64 over the same rounded numbers."""
    grad_SO, input_SI = (one.to("cuda", torch.bfloat16) for one in (rows(384, 512, 0), rows(384, 256, 1)))
    split = Segments((0, 256, 384), grad_SO.device).split(num_in=256, num_out=512, has_product=has_product)
    theirs, _ = exact(grad_SO.cpu(), input_SI.cpu(), [256, 128])
    for batch in split.batches:
        products_mTT = batch.products(grad_SO) * batch.masked_products(input_SI)
        ours = products_mTT.sum(dim=(1, 2), dtype=torch.float64).cpu()
        assert float((ours / theirs[list(batch.segments)] - 1).abs().max()) < 1e-5
    sums = GradientSums([torch.zeros(512, 256, device="cuda")], has_scores=has_product)
    sums.reset()
    sums.add_product(0, grad_SO, input_SI, ratio=0.5, score=2.0)
    sums.close_group(0.0)
    expected = (grad_SO.double().t() @ input_SI.double()).cpu()
    assert float((sums.take(0).cpu() - expected).norm() / expected.norm()) < 1e-5
