"""How far the logprobs of engine and learner may be apart, and what their rounding costs in sequence weights.

Arithmetic only. Independent of servers, HTTP and torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config import Config
from agentrl.engine import vllm_command
from agentrl.engine.base import Parity
from agentrl.engine.placement import Device
from agentrl.types import SumSigma

MEAN_BOUNDS: dict[tuple[Device, str], float] = {
    ("cpu", "float32"): 1e-4,  # thirty times what benchmarks/engine.md measures
    ("cpu", "bfloat16"): 0.15,  # three times what it measures; see also benchmarks/engine_head.md
    ("cuda", "float32"): 2e-2,  # not measured: room for an attention kernel that multiplies in TF32
    ("cuda", "bfloat16"): 0.15,  # not measured
}
"""Largest allowed mean of |engine - learner| on the probe text, in nats, by device and model.dtype."""
KL_OF_SQUARE = 20 / 9  # of normal errors it would be pi / 4: a KL of 0.05 beside a mean of 0.15
LARGEST_OF_MEAN = 10 / 3  # a largest error of 0.5 beside a mean of 0.15


@dataclass(frozen=True, slots=True)
class ParityBounds:
    """What an update's probe is held to. Wrong weights are off by nats on average; rounding is not, yet a single token
    may be far off: the mean and the KL refuse, the largest difference only warns.

    Example:
        >>> bounds = ParityBounds(0.15)
        >>> round(bounds.kl, 3), round(bounds.largest, 3)
        (0.05, 0.5)
    """

    mean: float
    """Nats."""

    @property
    def kl(self) -> float:
        """Nats a token. A few tokens that are far off reach it before the mean does."""
        return KL_OF_SQUARE * self.mean**2

    @property
    def largest(self) -> float:
        """Nats."""
        return LARGEST_OF_MEAN * self.mean

    def refuses(self, found: Parity) -> bool:
        """Whether these are not the learner's weights. A NaN is refused."""
        return not (found.mean_abs <= self.mean and found.kl <= self.kl)

    def warns(self, found: Parity) -> bool:
        """Whether a single token is further off than rounding usually is."""
        return not found.max_abs <= self.largest


def mean_bound(config: Config) -> float:
    """`engine.parity_bound`; where it is auto, the table's value for the engine's device and model.dtype.

    Servers at `engine.url` may have GPUs that this machine has not: theirs is the wider bound unless engine.device is
    cpu. Raises ConfigError for a device that is not available.
    """
    settings = config.engine
    if settings.parity_bound != "auto":
        return settings.parity_bound
    is_elsewhere = bool(settings.urls) and settings.device != "cpu"
    device = "cuda" if is_elsewhere else "cpu" if settings.urls else vllm_command.device_of(settings)
    return MEAN_BOUNDS[device, config.model.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRatio:
    """The summed log-ratio of a sequence, log w = sum of (learner - engine), where both hold the same weights.

    Example:
        >>> log_ratio_at(1024, [SumSigma(length=1, sigma=0.03, num_sums=9000)])
        LogRatio(length=1024, sigma=0.96, is_measured=False)
    """

    length: int
    """Tokens."""
    sigma: float
    """Standard deviation over sequences, nats."""
    is_measured: bool
    """False: extrapolated from shorter sums, as if they were independent."""

    @property
    def rho(self) -> float:
        """ESS ratio of such weights: (E w)^2 / E w^2 = exp(-sigma^2) for a normal log w.

        >>> round(LogRatio(length=4096, sigma=1.9, is_measured=False).rho, 3)
        0.027
        """
        return math.exp(-(self.sigma**2))


def log_ratio_at(length: int, measured: Sequence[SumSigma]) -> LogRatio | None:
    """Of sequences of `length` tokens: measured, or scaled by sqrt(length) from the longest that is. None without any.

    Independent errors grow so; errors that share a sign, such as a bias of one kernel, grow faster, up to linearly.
    """
    shorter = [one for one in measured if one.length <= length]
    if not shorter:
        return None
    longest = max(shorter, key=lambda one: one.length)
    sigma = longest.sigma * math.sqrt(length / longest.length)
    return LogRatio(length=length, sigma=sigma, is_measured=longest.length == length)
