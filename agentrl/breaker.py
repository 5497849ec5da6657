"""Ends a run whose parts fail too often, instead of letting it train on what little still works."""

from __future__ import annotations

from collections import deque

from agentrl.errors import ErrorRateExceeded, InfraError


class ErrorBreaker:
    """Watches the outcome of the last `window` groups.

    Args:
        max_rate: share of them that may fail for infrastructure.
        min_failures: failures that are always forgiven, so that one early failure ends nothing.
    """

    def __init__(self, max_rate: float, *, window: int = 100, min_failures: int = 5) -> None:
        self._max_rate = max_rate
        self._min_failures = min_failures
        self._failed: deque[bool] = deque(maxlen=window)
        self._first_error: InfraError | None = None

    def success(self) -> None:
        """A group was finished."""
        self._failed.append(False)

    def failure(self, error: InfraError) -> None:
        """A group failed for good. Raises ErrorRateExceeded, caused by the first failure, when there are too many."""
        self._failed.append(True)
        self._first_error = self._first_error or error
        num_failed = sum(self._failed)
        if num_failed > max(self._min_failures, self._max_rate * len(self._failed)):
            raise ErrorRateExceeded(
                f"{num_failed} of the last {len(self._failed)} groups failed for infrastructure reasons, more than "
                f"rollout.max_infra_error_rate={self._max_rate} allows. The first failure: {self._first_error}"
            ) from self._first_error
