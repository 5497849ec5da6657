"""What every arm of the rollout benchmark plays: the dialogue, its latencies, and the scripted engine.

Imports nothing but the standard library at the top, since the arm of another package runs in an environment of its own.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

NUM_CALLS = 4
NUM_TURNS = NUM_CALLS + 1
SYSTEM = (
    "You keep the books of a small shop. Look up what you need with the tool, one entry at a time, and add the amounts "
    "yourself. Think aloud before each step, in a few sentences. End with the total in \\boxed{}."
)
QUESTION = "What did the shop spend on flour, sugar, butter and eggs in the week of entry {index}?"
TOOL_NAME = "lookup"
TOOL_DESCRIPTION = "Look up one entry of the books."
THOUGHT = (
    "I have to find the amount for the next item and add it to what I have so far. The entry should be listed under "
    "the name of the item, with the supplier, the date of the delivery, the price of a unit and the number of units. I "
    "will ask for the entry now, and then compare the sum with the amount that was booked: both should be the same."
)
ENTRY = (
    "entry {key}: supplier Mill & Sons, delivered on Tuesday, 12 units at 3.25 each, booked 39.00, paid by transfer. "
)
ANSWER = "The four entries come to 39.00 each, so the total is 4 x 39.00 = 156.00. \\boxed{156}"
GOLD = "156"
BUSY_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Seconds of one generation and one call of the tool. A generation's are drawn from a log-normal law."""

    median_s: float
    sigma: float = 0.5
    tool_s: float = 0.05

    def draw(self, rng: random.Random) -> float:
        """Seconds of one generation."""
        return self.median_s * math.exp(rng.gauss(0.0, self.sigma))


def entry(key: str) -> str:
    """The tool's answer."""
    return ENTRY.format(key=key) * 3


def busy_entry(key: str) -> str:
    """The tool's answer, after BUSY_S of this thread's processor time."""
    until = time.thread_time() + BUSY_S
    while time.thread_time() < until:
        pass
    return entry(key)


def key_of(turn: int) -> str:
    """The entry that is looked up in a turn."""
    return ("flour", "sugar", "butter", "eggs")[turn]
