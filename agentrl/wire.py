"""What orchestrator and learner say to each other: three routes, msgpack bodies decoded into typed records only.

    GET  /v1/batch?policy_version=V   -> 200 Batch | 204 not yet, ask again | 410 the run is over
    POST /v1/step     StepOutput      -> 200
    POST /v1/weights  WeightsRef      -> 200 once every engine holds them

Repeating any call is safe: the same version gets the same batch until its step was reported.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

MEDIA_TYPE = "application/msgpack"
BATCH, STEP, WEIGHTS = "/v1/batch", "/v1/step", "/v1/weights"
LONG_POLL_S = 10.0

T = TypeVar("T")


def encode(record: Any) -> bytes:
    """A frozen record as msgpack."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, record_type: type[T]) -> T:
    """msgpack into `record_type`. Raises msgspec.ValidationError when a field is missing or of another type."""
    return msgspec.msgpack.decode(data, type=record_type)
