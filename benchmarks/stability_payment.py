"""What an episode of the calculator toy is paid: rules that survive under 0 and 1 need not survive under other rewards.

    binary  1 for the right answer, else 0
    signed  1 and -1: binary times 2 less 1, so a baseline that follows the group sees no difference
    shaped  1 for the right answer; for another number 0.5 (1 - error / 50), at least 0
    floor   1 for the right answer, 0.9 for another number, 0 without a number: rarely zero
    noisy   binary, and one episode in ten is graded the wrong way round

Accuracies and curves count right answers whatever is paid. Independent of rules and of training.
Shapes: _B episodes of a run.
"""

from __future__ import annotations

from typing import Literal, assert_never, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.calculator import NO_ANSWER

Payment = Literal["binary", "signed", "shaped", "floor", "noisy"]
PAYMENTS: tuple[Payment, ...] = get_args(Payment)
NEAR = 50
FLOOR = 0.9
NOISE = 0.1


def paid(
    payment: Payment, right_B: NDArray[np.float32], error_B: NDArray[np.int64], generator: torch.Generator
) -> Tensor:
    """The reward of each episode. float64 [B]

    Args:
        right_B: 1 for a right answer, else 0.
        error_B: distance from the right answer; NO_ANSWER without one.
        generator: decides which episodes `noisy` grades wrong; the other payments draw nothing.

    >>> right, error = np.array([1, 0, 0], np.float32), np.array([0, 10, NO_ANSWER])
    >>> [paid(name, right, error, torch.Generator()).tolist() for name in ("signed", "shaped", "floor")]
    [[1.0, -1.0, -1.0], [1.0, 0.4, 0.0], [1.0, 0.9, 0.0]]
    """
    reward_B = torch.from_numpy(right_B.astype(np.float64))
    is_wrong_number_B = torch.from_numpy((error_B != NO_ANSWER) & (right_B == 0))
    match payment:
        case "binary":
            return reward_B
        case "signed":
            return 2 * reward_B - 1
        case "shaped":
            near_B = 0.5 * (1 - torch.from_numpy(error_B.astype(np.float64)) / NEAR).clamp(min=0)
            return torch.where(is_wrong_number_B, near_B, reward_B)
        case "floor":
            return torch.where(is_wrong_number_B, FLOOR, reward_B)
        case "noisy":
            is_flipped_B = torch.rand(len(reward_B), generator=generator) < NOISE
            return torch.where(is_flipped_B, 1 - reward_B, reward_B)
        case _:
            assert_never(payment)
