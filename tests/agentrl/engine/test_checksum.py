"""The checksum: every value, place, name, dtype and shape counts; order of tensors, layout and device do not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.engine.checksum import CHUNK_WORDS, WORD_BYTES, Checksum, _weighted, checksum_of

CHUNK_FLOATS = CHUNK_WORDS * WORD_BYTES // 4


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of(tensor: Tensor, name: str = "w") -> str:
    return checksum_of([(name, tensor)])


def by_hand(tensor: Tensor, name: str) -> int:
    """The definition in plain Python integers, for a tensor of one chunk at most."""
    import hashlib
    import json
    import struct

    def split_mix(at: int) -> int:
        x = at * 0x9E3779B97F4A7C15 % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31 | 1

    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 8)
    words = struct.unpack(f"<{len(data) // 8}q", data)
    low = sum(w * split_mix(i + 1) for i, w in enumerate(words)) % 2**64
    high = sum((w >> 32) * split_mix(CHUNK_WORDS + i + 1) for i, w in enumerate(words)) % 2**64
    header = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
    return int.from_bytes(hashlib.sha256(header + struct.pack("<QQ", low, high)).digest(), "big")


def test_it_is_what_its_docstring_says() -> None:
    a, b = noise(33), noise(4, 5).to(torch.bfloat16)
    assert checksum_of([("a", a), ("b", b)]) == f"{(by_hand(a, 'a') + by_hand(b, 'b')) % 2**256:064x}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("num", [0, 1, 3, 4 * CHUNK_WORDS, 2 * CHUNK_FLOATS + 5])
def test_any_dtype_and_length(dtype: torch.dtype, num: int) -> None:
    tensor = noise(num).to(dtype)
    assert of(tensor) == of(tensor.clone())
    if num:
        changed = tensor.clone()
        changed[-1] = changed[-1] == 0
        assert torch.equal(changed, tensor) or of(changed) != of(tensor)


def test_a_scalar_and_a_list_of_one_differ() -> None:
    assert of(torch.tensor(1.0)) != of(torch.tensor([1.0]))


@given(at=st.integers(0, 2 * CHUNK_FLOATS + 6), bit=st.integers(0, 31))
@settings(max_examples=60, deadline=None)
def test_every_flipped_bit_is_seen(at: int, bit: int) -> None:
    whole = noise(2 * CHUNK_FLOATS + 7)
    flipped = whole.clone()
    flipped.view(torch.int32)[at] ^= torch.tensor(-(2**31) if bit == 31 else 1 << bit, dtype=torch.int32)
    assert of(flipped) != of(whole)


@given(pair=st.lists(st.integers(0, 2 * CHUNK_FLOATS - 1), min_size=2, max_size=2, unique=True))
@settings(max_examples=60, deadline=None)
def test_two_values_that_swap_or_change_sign_are_seen(pair: list[int]) -> None:
    whole = noise(2 * CHUNK_FLOATS)
    swapped, mirrored = whole.clone(), whole.clone()
    swapped[pair] = whole[pair[::-1]]
    mirrored[pair] = -whole[pair]
    opposite = whole.clone()
    opposite[pair[1]] = -opposite[pair[0]]
    exchanged = opposite.clone()
    exchanged[pair] = opposite[pair[::-1]]
    assert len({of(whole), of(swapped), of(mirrored)}) == 3
    assert of(opposite) != of(exchanged)


def test_all_signs_changed_are_seen() -> None:
    whole = noise(2 * CHUNK_FLOATS)
    assert of(-whole) != of(whole)


def test_chunks_that_swap_are_seen() -> None:
    whole = noise(2 * CHUNK_FLOATS)
    assert of(torch.cat([whole[CHUNK_FLOATS:], whole[:CHUNK_FLOATS]])) != of(whole)


def test_name_dtype_and_shape_count() -> None:
    zeros = torch.zeros(4, 2)
    others = [of(zeros, "v"), of(zeros.view(2, 4)), of(zeros.to(torch.int32)), of(torch.zeros(4, 3))]
    assert len({of(zeros), *others}) == 5


def test_values_that_change_their_names_are_seen() -> None:
    a, b = noise(8, seed=1), noise(8, seed=2)
    assert checksum_of([("a", a), ("b", b)]) != checksum_of([("a", b), ("b", a)])


@given(order=st.permutations(range(5)))
@settings(max_examples=20, deadline=None)
def test_the_order_of_tensors_does_not_matter(order: list[int]) -> None:
    tensors = [(f"t{i}", noise(10 + i, seed=i)) for i in range(5)]
    assert checksum_of([tensors[i] for i in order]) == checksum_of(tensors)


def test_a_tensor_counted_twice_is_seen() -> None:
    tensor = noise(8)
    assert checksum_of([("a", tensor)] * 2) != checksum_of([("a", tensor)])


def test_layout_in_memory_does_not_matter() -> None:
    whole = noise(300, 400)
    unaligned = torch.empty(300 * 400 + 1)[1:].copy_(whole.flatten()).view(300, 400)
    assert unaligned.data_ptr() % WORD_BYTES != whole.data_ptr() % WORD_BYTES
    assert of(whole.t().contiguous().t()) == of(whole) == of(unaligned)


def test_what_passes_through_is_counted_and_unchanged() -> None:
    tensors = [("a", noise(3)), ("b", noise(5))]
    checksum = Checksum()
    assert [name for name, tensor in checksum.through(tensors) if tensor is dict(tensors)[name]] == ["a", "b"]
    assert checksum.hexdigest() == checksum_of(tensors)
    assert checksum.num_bytes == 32


def test_many_chunks_at_once_are_weighted_as_one_by_one() -> None:
    words = noise(3, 2000).view(torch.int64)
    keys, scratch = noise(2000, seed=3).view(torch.int64), torch.empty_like(words)
    one_by_one = torch.cat([_weighted(row[None], keys, scratch[:1]) for row in words])
    assert torch.equal(_weighted(words, keys, scratch), one_by_one)


@pytest.mark.gpu
def test_a_gpu_counts_as_a_cpu_does() -> None:
    for num in (1, CHUNK_FLOATS, 300 * CHUNK_FLOATS + 77):
        tensor = noise(num)
        assert of(tensor.cuda()) == of(tensor)
