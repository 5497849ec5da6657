"""A chat session that forwards each call to a chat endpoint: an agent is measured, and no token is recorded.

Independent of HTTP servers and engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.chat_model import ChatModel, PromptTooLong
from agentrl.chat.openai_schema import ChatAnswer, ChatRequest, Finish
from agentrl.chat.session import ChatSession
from agentrl.config import RolloutConfig
from agentrl.errors import AgentRLError
from agentrl.rollouts.episode import SegmentRecord
from agentrl.types import FinishReason, Message, StopReason


class ForwardSession(ChatSession):
    """Its one record is the conversation with the last answer.

    session = ForwardSession(model, config=config, max_calls=64)
    """

    def __init__(self, model: ChatModel, *, config: RolloutConfig, max_calls: int) -> None:
        super().__init__(max_calls=max_calls)
        self._model = model
        self._config = config
        self._latest: tuple[Message, ...] = ()

    @property
    def records(self) -> Sequence[SegmentRecord]:
        """At most one, without turns."""
        if not self._latest:
            return []
        return [SegmentRecord(turns=(), messages=self._latest, counts={"turns": self.num_answers})]

    @property
    def messages(self) -> Sequence[Message]:
        """The messages of the last call, and its answer."""
        return self._latest

    async def _play(self, request: ChatRequest) -> ChatAnswer:
        allowed = self._config.max_turn_tokens
        try:
            reply = await self._model.say(
                request.messages,
                request.tools,
                max_tokens=min(request.max_tokens or allowed, allowed),
                temperature=self._config.temperature,
                top_p=self._config.top_p,
                stop=request.stop,
            )
        except PromptTooLong as error:
            raise self._refuse(StopReason.MAX_CONTEXT, str(error), code="context_length_exceeded") from error
        except AgentRLError as error:
            raise self._fail(error) from error
        message = reply.message
        if request.single_call:
            message = Message(role="assistant", content=message.content, tool_calls=message.tool_calls[:1])
        finish: Finish = "tool_calls" if message.tool_calls else "stop"
        if reply.finish_reason is FinishReason.LENGTH:
            finish = "length"
        self._latest = (*request.messages, message)
        self.generate_s += reply.generate_s
        return ChatAnswer(
            message=message,
            finish=finish,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_completion_tokens=reply.num_completion_tokens,
        )
