"""What changed between two versions of a model, counted by hand."""

import torch

from benchmarks.weight_updates import Change, change


def test_elements_and_bytes_are_counted_over_all_tensors() -> None:
    """Two of 110 elements: one at a position (4 + 2 bytes), one in a tensor of which a mask is smaller (2 + 2)."""
    old = {"a": torch.zeros(100, dtype=torch.bfloat16), "b": torch.zeros(10, dtype=torch.bfloat16)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"][5], new["b"][9] = 1.0, 2.0
    found = change(old, new)
    assert found == Change(share=2 / 110, num_bytes=6 + 4, whole_bytes=220)
    assert found.relative == 10 / 220


def test_the_same_version_has_no_change() -> None:
    weights = {"a": torch.ones(4)}
    assert change(weights, weights) == Change(share=0.0, num_bytes=0, whole_bytes=16)
