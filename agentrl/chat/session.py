"""The chat session of one agent's episode: which calls are accepted, how many were answered, and why it ended.

A call that exceeds the run's limits is refused, and the session remembers why: an agent that then gives up has ended
and has not failed. A part that fails ends the session. Independent of HTTP, tokens and engines.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.chat.openai_schema import ApiError, ChatAnswer, ChatRequest
from agentrl.errors import AgentRLError
from agentrl.rollouts.episode import SegmentRecord
from agentrl.types import Message, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why the last call beyond the run's limits was refused.

    Refusal(stop_reason=StopReason.MAX_TURNS, reason="the episode has had its 64 calls")
    """

    stop_reason: StopReason
    reason: str


class ChatSession(ABC):
    """Answers the calls of one agent; they may overlap. The agent may have `max_calls` answers.

    async with proxy.session(session) as endpoint:
        await env.run(task=task, endpoint=endpoint)
    session.records
    """

    def __init__(self, *, max_calls: int) -> None:
        self._max_calls = max_calls
        self._num_running = 0
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_answers = 0
        self.num_tool_calls = 0
        self.num_completion_tokens = 0
        self.generate_s = 0.0
        """Time spent waiting for the model, summed over calls."""
        self.refusal: Refusal | None = None
        """The last refusal, if any."""

    @property
    @abstractmethod
    def records(self) -> Sequence[SegmentRecord]:
        """All conversations with at least one answer, oldest first."""

    @property
    @abstractmethod
    def messages(self) -> Sequence[Message]:
        """The messages of the conversation with the last answer."""

    @abstractmethod
    async def _play(self, request: ChatRequest) -> ChatAnswer:
        """Answer one call, record it and add to `generate_s`. Raises ApiError, also through `_refuse` and `_fail`."""

    @property
    def has_calls_running(self) -> bool:
        """Whether an answer is being generated."""
        return self._num_running > 0

    async def failure(self) -> None:
        """Wait until a part fails and raise its error; never returns."""
        await asyncio.shield(self._failed)

    def raise_failure(self) -> None:
        """Raise the error of the part that failed, if one has."""
        if self._failed.done():
            self._failed.result()

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Answer one call. Cancelling it aborts its generation, and nothing of it is recorded.

        Raises ApiError: 400 for what the agent can fix, 500 once a part has failed.
        """
        if self._failed.done():
            raise _gone()
        if self.num_answers + self._num_running >= self._max_calls:
            reason = f"the episode has had its {self._max_calls} calls"
            raise self._refuse(StopReason.MAX_TURNS, reason, code="max_turns_exceeded")
        self._num_running += 1
        try:
            answer = await self._play(request)
        finally:
            self._num_running -= 1
        self.num_answers += 1
        self.num_tool_calls += len(answer.message.tool_calls)
        self.num_completion_tokens += answer.num_completion_tokens
        return answer

    def _refuse(self, stop_reason: StopReason, reason: str, *, code: str) -> ApiError:
        self.refusal = Refusal(stop_reason=stop_reason, reason=reason)
        return ApiError(400, reason, code=code, param="messages")

    def _fail(self, error: AgentRLError) -> ApiError:
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # retrieved: an episode that has ended does not ask for it
        return _gone()


def _gone() -> ApiError:
    return ApiError(500, "the engine failed; this episode is over and will be played again", code="engine_failed")
