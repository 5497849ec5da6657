"""The orchestrator's HTTP routes (agentrl/training/learner_api.py) as the learner calls them.

Every call has a deadline. An orchestrator that cannot be reached is tried again for 30 s, since its answers are
repeatable; then, or at once after a refusal, the call raises LearnerError. Independent of training.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from enum import Enum, auto

import httpx

from agentrl.engine.base import Receivers
from agentrl.errors import LearnerError, WeightsWanted, boundary
from agentrl.training import learner_api as api
from agentrl.types import Batch, StepOutput, TransferInit, WeightsRef

GONE_AFTER_S = 30.0
RETRY_EVERY_S = 0.5


class NoBatch(Enum):
    """Why the orchestrator gives no batch."""

    NOT_YET = auto()
    PUBLISH_AGAIN = auto()
    """An engine was restarted and does not have the present weights."""
    RUN_OVER = auto()


AGAIN = 205
NO_BATCH = {204: NoBatch.NOT_YET, AGAIN: NoBatch.PUBLISH_AGAIN, 410: NoBatch.RUN_OVER}


class OrchestratorClient:
    """One learner's connection to the orchestrator.

    Example::

        client = OrchestratorClient("http://127.0.0.1:8700", token=token)
        answer = client.poll(policy_version=3)
        if isinstance(answer, Batch):
            client.report(learner.step(answer))
        client.close()

    Args:
        publish_timeout_s: deadline of `publish` and `open_transfer`, which wait for engines.
        gone_after_s: how long an orchestrator that cannot be reached is tried again.
    """

    def __init__(
        self, url: str, *, token: str, publish_timeout_s: float = 300.0, gone_after_s: float = GONE_AFTER_S
    ) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {token}", api.LEARNER_HEADER: uuid.uuid4().hex}
        self._client = httpx.Client(base_url=url, headers=headers, trust_env=False)
        self._publish_timeout_s = publish_timeout_s
        self._gone_after_s = gone_after_s

    def poll(self, policy_version: int, num_known: int = 0) -> Batch | NoBatch:
        """One long poll for the batch of this version, without the `num_known` groups that came in earlier parts.

        Raises LearnerError.
        """
        response = self._call(
            lambda: self._client.get(
                api.BATCH,
                params={"policy_version": policy_version, "num_known": num_known},
                timeout=api.LONG_POLL_S + self._gone_after_s,
            )
        )
        if response.status_code in NO_BATCH:
            return NO_BATCH[response.status_code]
        with boundary(LearnerError, "reading the batch"):
            return api.decode(response.content, Batch)

    def report(self, output: StepOutput) -> None:
        """Report a finished step. Raises LearnerError."""
        self._post(api.STEP, output, timeout_s=self._gone_after_s)

    def receivers(self, policy_version: int) -> Receivers:
        """The engines that will take this version from the learner's group. Waits for one that runs.

        Raises LearnerError.
        """
        params = {"policy_version": policy_version}
        response = self._call(lambda: self._client.get(api.RECEIVERS, params=params, timeout=self._publish_timeout_s))
        with boundary(LearnerError, "reading which engines take the weights"):
            return api.decode(response.content, Receivers)

    def open_transfer(self, init: TransferInit) -> None:
        """Return once they have joined the learner's group. Raises LearnerError, WeightsWanted."""
        response = self._post(api.TRANSFER, init, timeout_s=self._publish_timeout_s)
        if response.status_code == AGAIN:
            raise WeightsWanted("an engine could not join the learner's group")

    def publish(self, ref: WeightsRef) -> None:
        """Return once every engine has the weights and has proven it.

        Raises LearnerError; WeightsWanted if the transfer broke off and the weights must be published again.
        """
        response = self._post(api.WEIGHTS, ref, timeout_s=self._publish_timeout_s)
        if response.status_code == AGAIN:
            raise WeightsWanted(f"an engine did not get all of version {ref.policy_version}")

    def finish(self) -> None:
        """Report that the last weights were exported. Raises LearnerError."""
        self._call(lambda: self._client.post(api.FINISHED, timeout=self._gone_after_s))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _post(self, route: str, record: StepOutput | TransferInit | WeightsRef, *, timeout_s: float) -> httpx.Response:
        body, headers = api.encode(record), {"Content-Type": api.MEDIA_TYPE}
        return self._call(lambda: self._client.post(route, content=body, headers=headers, timeout=timeout_s))

    def _call(self, request: Callable[[], httpx.Response]) -> httpx.Response:
        """Raises LearnerError if the orchestrator cannot be reached for `gone_after_s` or refuses the request."""
        deadline_s = time.monotonic() + self._gone_after_s
        while True:
            try:
                response = request()
                break
            except httpx.TransportError as error:
                if isinstance(error, httpx.ReadTimeout) or time.monotonic() > deadline_s:
                    raise LearnerError(
                        f"the orchestrator at {self._url} is gone: {error or type(error).__name__}"
                    ) from error
                time.sleep(RETRY_EVERY_S)
        if response.status_code >= 400 and response.status_code != 410:
            raise LearnerError(f"the orchestrator answered {response.status_code}: {response.text[:500]}")
        return response
