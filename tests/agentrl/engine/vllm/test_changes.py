"""What changed between two versions: the smallest form, exact to the bit, and files that do not belong are refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from agentrl.engine.checksum import checksum_of
from agentrl.engine.vllm import changes
from agentrl.engine.vllm.changes import AT, MASK, VALUES, WHOLE, applied, difference

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.float8_e4m3fn)


def stepped(old: Tensor, num_changed: int) -> Tensor:
    """Other values in the first `num_changed` elements."""
    new = old.clone()
    new.view(-1)[:num_changed] += 1
    return new


def test_a_changed_element_is_a_position_and_a_value() -> None:
    old = torch.zeros(10, 10, dtype=torch.bfloat16)
    new = old.clone()
    new[3, 4], new[9, 9] = 0.5, -2.0
    parts = difference(old, new)
    assert parts.keys() == {AT, VALUES}
    assert parts[AT].tolist() == [34, 99] and parts[AT].dtype == torch.int32
    assert parts[VALUES].tolist() == [0.5, -2.0] and parts[VALUES].dtype == torch.bfloat16


def test_many_are_a_bit_for_each_element() -> None:
    old = torch.zeros(10, dtype=torch.bfloat16)
    new = old.clone()
    new[0] = new[2] = new[9] = 1.0
    parts = difference(old, new)
    assert parts.keys() == {MASK, VALUES}
    assert parts[MASK].tolist() == [0b00000101, 0b00000010] and parts[VALUES].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("num_changed", "kinds"),
    [
        (0, set()),
        # of 1600 elements of 2 bytes: 6 bytes each, or 200 and 2 bytes each, or 3200
        (49, {AT, VALUES}),  # 294 < 298
        (51, {MASK, VALUES}),  # 302 < 306
        (1499, {MASK, VALUES}),  # 3198 < 3200
        (1501, {WHOLE}),  # 3202 > 3200
        (1600, {WHOLE}),
    ],
)
def test_the_smallest_form_is_chosen(num_changed: int, kinds: set[str]) -> None:
    old = torch.zeros(40, 40, dtype=torch.bfloat16)
    new = stepped(old, num_changed)
    parts = difference(old, new)
    assert parts.keys() == kinds
    assert torch.equal(applied(old, [parts]), new)


@given(data=st.data())
def test_what_changed_makes_the_new_of_the_old_to_the_bit(data: st.DataObject) -> None:
    """Random bits are NaN of many kinds, infinities and both zeros too."""
    dtype, size = data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(1, 200))
    share, seed = data.draw(st.floats(0, 1)), data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    old, other = (
        torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
        for _ in range(2)
    )
    is_new = torch.rand(size, generator=generator) < share
    new = torch.from_numpy(old.clone().view(torch.uint8).numpy()).view(dtype)
    new.view(size, 1).view(torch.uint8)[is_new] = other.view(size, 1).view(torch.uint8)[is_new]
    before = old.clone()
    result = applied(old, [difference(old, new)])
    assert torch.equal(result.view(torch.uint8), new.view(torch.uint8))
    assert torch.equal(old.view(torch.uint8), before.view(torch.uint8)), "the older version was changed"


def test_a_zero_that_becomes_negative_is_a_change_and_a_nan_that_stays_is_none() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0])
    new = torch.tensor([-0.0, float("nan"), 1.0])
    assert difference(old, new)[VALUES].tolist() == [0.0]
    assert difference(new, new.clone()) == {}


def test_several_changes_are_made_in_their_order() -> None:
    versions = [torch.zeros(100)]
    for num_changed in (1, 100, 2, 60, 0, 1):  # positions, whole, mask and nothing
        versions.append(stepped(versions[-1], num_changed))
    steps = [difference(old, new) for old, new in pairwise(versions)]
    assert {frozenset(step) for step in steps} == {
        frozenset(),
        frozenset({AT, VALUES}),
        frozenset({MASK, VALUES}),
        frozenset({WHOLE}),
    }
    assert torch.equal(applied(versions[0], steps), versions[-1])
    assert torch.equal(applied(versions[2], steps[2:]), versions[-1])


def test_an_adapter_is_added_to_the_weight_of_the_whole_folder() -> None:
    """0.5 * [1, 2]^T [3, 4] = [[1.5, 2], [3, 4]]"""
    adapter = {
        changes.DOWN: torch.tensor([[3.0, 4.0]]),
        changes.UP: torch.tensor([[1.0], [2.0]]),
        changes.SCALE: torch.tensor(0.5, dtype=torch.float64),
    }
    old = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.bfloat16)
    new = applied(old, [adapter])
    assert new.tolist() == [[2.5, 3.0], [3.0, 4.0]] and new.dtype == torch.bfloat16
    assert old.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    "parts",
    [
        {WHOLE: torch.zeros(3)},
        {WHOLE: torch.zeros(4, dtype=torch.bfloat16)},
        {AT: torch.tensor([4], dtype=torch.int32), VALUES: torch.ones(1)},
        {AT: torch.tensor([-1], dtype=torch.int32), VALUES: torch.ones(1)},
        {AT: torch.tensor([1], dtype=torch.int32), VALUES: torch.ones(2)},
        {AT: torch.tensor([1], dtype=torch.int32), VALUES: torch.ones(1, dtype=torch.bfloat16)},
        {MASK: torch.tensor([3], dtype=torch.uint8), VALUES: torch.ones(3)},
    ],
)
def test_changes_of_another_tensor_are_refused(parts: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=r"became|values"):
        applied(torch.zeros(4), [parts])


def test_tensors_of_two_models_have_no_difference() -> None:
    with pytest.raises(ValueError, match=r"float32 \(2,\) became torch.bfloat16 \(3,\)"):
        difference(torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16))


def written(folder: Path, tensors: dict[str, Tensor], file: str = "delta-00001.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / file)
    return folder


def test_folders_are_read_in_their_order_from_all_their_files(tmp_path: Path) -> None:
    old = [("a", torch.zeros(4)), ("b:c", torch.zeros(4)), ("same", torch.ones(1))]
    first = written(tmp_path / "1", {"whole:a": torch.ones(4)})
    written(first, {"whole:b:c": torch.full((4,), 2.0)}, "delta-00002.safetensors")
    second = written(tmp_path / "2", {"at:a": torch.tensor([2], dtype=torch.int32), "values:a": torch.tensor([7.0])})
    nothing = written(tmp_path / "3", {})
    new = dict(changes.changed_tensors(old, [first, second, nothing]))
    assert new["a"].tolist() == [1, 1, 7, 1] and new["b:c"].tolist() == [2] * 4 and new["same"] is old[2][1]
    changes.check([first, second, nothing], ["a", "b:c", "same"])
    assert checksum_of(changes.changed_tensors(old, [])) == checksum_of(old)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"whole:unheard": torch.ones(1)}, "unknown tensors.*unheard"),
        ({"values:a": torch.ones(1)}, "incompletely.*'a'"),
        ({"whole:a": torch.ones(1), "values:a": torch.ones(1)}, "incompletely"),
    ],
)
def test_a_folder_of_another_model_or_a_damaged_one_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        changes.check([written(tmp_path / "1", tensors)], ["a"])


def test_a_folder_without_changes_in_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="see the same disk"):
        changes.check([tmp_path], ["a"])
