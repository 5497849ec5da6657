"""Ends a run whose parts fail too often, instead of letting it train on what little still works."""

from __future__ import annotations

from collections import Counter, deque

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
        self._outcomes: deque[str] = deque(maxlen=window)  # the kind of failure; "" for none
        self._first_error: InfraError | None = None

    def success(self) -> None:
        """A group was finished."""
        self._outcomes.append("")

    def failure(self, error: InfraError) -> None:
        """A group failed for good. Raises ErrorRateExceeded, caused by the first failure, when there are too many."""
        self._outcomes.append(type(error).__name__)
        self._first_error = self._first_error or error
        kinds = Counter(kind for kind in self._outcomes if kind)
        num_failed = kinds.total()
        if num_failed > max(self._min_failures, self._max_rate * len(self._outcomes)):
            counts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
            raise ErrorRateExceeded(
                f"{num_failed} of the last {len(self._outcomes)} groups failed for infrastructure reasons ({counts}), "
                f"more than rollout.max_infra_error_rate={self._max_rate} allows. The first failure: "
                f"{self._first_error}"
            ) from self._first_error
