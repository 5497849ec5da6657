"""The split of a generated problem. Only its text decides, so no seed brings a test problem into training."""

from __future__ import annotations

import hashlib

from agentrl.env import Split

NUM_TEST_TASKS = 512
TEST_SHARE = 1 / 8


def split_of(text: str) -> Split:
    """The split of a text, always the same. One text in eight belongs to `test`."""
    first_byte = hashlib.sha256(text.encode()).digest()[0]
    return "test" if first_byte < 256 * TEST_SHARE else "train"
