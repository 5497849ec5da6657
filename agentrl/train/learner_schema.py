"""What orchestrator and learner say to each other: five routes, msgpack bodies decoded into typed records only.

    GET  /v1/batch?policy_version=V   -> 200 Batch | 204 not yet, ask again | 205 publish V again | 410 the run is over
    POST /v1/step      StepOutput     -> 200
    POST /v1/transfer  TransferInit   -> 200 once every engine joined the learner's group
    POST /v1/weights   WeightsRef     -> 200 once every engine holds them and has proven it | 205 publish again
    POST /v1/finished                 -> 200 after 410: the last weights lie in the run's folder

Every call carries the header x-agentrl-learner: an id that each learner process makes up. A new one means that the
learner was restarted: its first call waits until the run goes on from where that learner stands; the old one gets 409.
Repeating any call is safe: the same version gets the same batch until its step was reported. 205 is the answer after an
engine was restarted whose weights only the learner can give it again: it opens its transfer anew and publishes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

MEDIA_TYPE = "application/msgpack"
BATCH, STEP, TRANSFER, WEIGHTS = "/v1/batch", "/v1/step", "/v1/transfer", "/v1/weights"
FINISHED = "/v1/finished"
LEARNER_HEADER = "x-agentrl-learner"
LONG_POLL_S = 10.0

T = TypeVar("T")


def encode(record: Any) -> bytes:
    """A frozen record as msgpack."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, record_type: type[T]) -> T:
    """msgpack into `record_type`. Raises msgspec.ValidationError when a field is missing or of another type."""
    return msgspec.msgpack.decode(data, type=record_type)
