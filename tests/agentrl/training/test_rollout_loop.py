"""The breaker trips on the rate of failures, not on a few early ones, and keeps the first for the reader."""

import pytest

from agentrl.errors import EngineError, ErrorRateExceeded, SandboxError
from agentrl.training.rollout_loop import ErrorBreaker


def outcomes(breaker: ErrorBreaker, text: str) -> None:
    """`.` is a finished group, `x` a failed one."""
    for number, sign in enumerate(text):
        if sign == ".":
            breaker.success()
        else:
            breaker.failure(SandboxError(f"failure {number}"))


@pytest.mark.parametrize("text", ["xxxxx", "." * 100 + "x" * 20, ".x" * 5 + "." * 20, "x" * 5 + "." * 200 + "x" * 20])
def test_failures_within_the_rate_or_too_few_to_tell_are_forgiven(text: str) -> None:
    outcomes(ErrorBreaker(0.2), text)


@pytest.mark.parametrize("text", ["xxxxxx", "." * 100 + "x" * 21, "..x" * 6])
def test_more_than_the_rate_ends_the_run(text: str) -> None:
    with pytest.raises(ErrorRateExceeded):
        outcomes(ErrorBreaker(0.2), text)


def test_the_first_failure_is_the_cause_and_the_kinds_are_counted() -> None:
    breaker, first = ErrorBreaker(0.0, min_failures=1), EngineError("connection refused")
    breaker.failure(first)
    breaker.success()
    with pytest.raises(ErrorRateExceeded, match=r"2 of the last 3 .*1 EngineError, 1 SandboxError.*connection refused"):
        breaker.failure(SandboxError("gone"))
    with pytest.raises(ErrorRateExceeded) as caught:
        breaker.failure(SandboxError("gone"))
    assert caught.value.__cause__ is first
