"""A door that lets every learner in: for tests that play the orchestrator's side themselves."""

from __future__ import annotations

from agentrl.train.learner_api import LearnerPort


class OpenDoor:
    """Leads every caller to the same port."""

    def __init__(self, port: LearnerPort) -> None:
        self._port = port

    async def seat_of(self, learner_id: str) -> LearnerPort:
        return self._port
