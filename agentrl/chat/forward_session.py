"""A chat session that hands each call on to any chat endpoint: an agent is measured, and no token is recorded.

Knows no HTTP server and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.chat_model import ChatModel, ChatRules, PromptTooLong
from agentrl.chat.openai_schema import ChatAnswer, ChatRequest, Finish
from agentrl.chat.session import ChatSession, Record
from agentrl.errors import AgentRLError
from agentrl.types import FinishReason, Message, StopReason


class ForwardSession(ChatSession):
    """Its one record is the conversation with the last answer."""

    def __init__(self, *, model: ChatModel, rules: ChatRules, max_calls: int) -> None:
        super().__init__(max_calls=max_calls)
        self._model = model
        self._rules = rules
        self._latest: tuple[Message, ...] = ()

    @property
    def records(self) -> Sequence[Record]:
        """At most one, without turns."""
        return [Record(turns=(), messages=self._latest)] if self._latest else []

    @property
    def messages(self) -> Sequence[Message]:
        """Of the last call, and its answer."""
        return self._latest

    async def _play(self, request: ChatRequest) -> ChatAnswer:
        allowed = self._rules.limits.max_turn_tokens
        try:
            reply = await self._model.say(
                request.messages,
                request.tools,
                max_tokens=min(request.max_tokens or allowed, allowed),
                temperature=self._rules.temperature,
                top_p=self._rules.top_p,
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
        return ChatAnswer(
            message=message,
            finish=finish,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_completion_tokens=reply.num_completion_tokens,
        )
