"""One session for every learner process: for tests that play the orchestrator's side themselves."""

from __future__ import annotations

from agentrl.training.learner_api import LearnerCalls


class OneSession:
    """Gives every caller the same session."""

    def __init__(self, session: LearnerCalls) -> None:
        self._session = session

    async def session_of(self, learner_id: str) -> LearnerCalls:
        return self._session
