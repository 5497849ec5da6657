"""A chat session by token ids: each call is generated through an Engine and recorded, and can be trained on.

The engine's tokens are the only record of what the model said. Independent of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.chat.openai_schema import ApiError, ChatAnswer, ChatRequest, Finish
from agentrl.chat.session import ChatSession
from agentrl.config import RolloutConfig
from agentrl.errors import ConfigError, EngineError
from agentrl.rollouts.episode import SegmentRecord
from agentrl.rollouts.generation import TokenGenerator
from agentrl.tokens.branches import SegmentStore
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.tokens.tool_calls import THINK_CLOSE, THINK_OPEN, parse_hermes
from agentrl.types import Completion, FinishReason, Message, Sampling, StopReason


class TokenSession(ChatSession):
    """Each call is rendered, generated and recorded; every segment of the record is one conversation.

        session = TokenSession(generator, tokenizer=tokenizer, config=config, sampling=sampling, max_calls=64)

    Args:
        tokenizer: with the hermes tool format, which is that of a chat endpoint.
        sampling: temperature, top_p and stop tokens of the run, which override those of a call.
        max_calls: answers the agent may have.
    """

    def __init__(
        self,
        generator: TokenGenerator,
        *,
        tokenizer: TurnTokenizer,
        config: RolloutConfig,
        sampling: Sampling,
        max_calls: int,
    ) -> None:
        super().__init__(max_calls=max_calls)
        self._generator = generator
        self._tokenizer = tokenizer
        self._config = config
        self._sampling = sampling
        self.store = SegmentStore(self._tokenizer)
        """What was recorded."""

    @property
    def records(self) -> Sequence[SegmentRecord]:
        """See ChatSession."""
        return [
            SegmentRecord(turns=tuple(s.turns), messages=tuple(s.messages), counts={"turns": len(s.turns)})
            for s in self.store.segments
        ]

    @property
    def messages(self) -> Sequence[Message]:
        """See ChatSession."""
        return self.store.latest.messages if self.store.latest is not None else ()

    async def _play(self, request: ChatRequest) -> ChatAnswer:
        try:
            point = self.store.branch_point(request.messages, request.tools)
        except ConfigError as error:
            raise ApiError(400, str(error), param="messages") from error
        try:
            prompt, number = point.prompt_ids, self._generator.num_requests
            completion = await self._generator.generate(prompt, self._fitted(request, len(prompt)))
            self.generate_s = self._generator.generate_s
            said, answer = self._read(completion, request, number=number, num_prompt_tokens=len(prompt))
        except EngineError as error:
            self.store.release(point)
            raise self._fail(error) from error
        except BaseException:
            self.store.release(point)
            raise
        self.store.commit(point, completion, said=said, shown=answer.message)
        return answer

    def _fitted(self, request: ChatRequest, num_prompt_tokens: int) -> Sampling:
        """The run's sampling with the call's own limits. Raises ApiError when the prompt leaves no room."""
        room = self._config.max_context - num_prompt_tokens
        if room < self._config.min_turn_tokens:
            reason = (
                f"This model's maximum context length is {self._config.max_context} tokens (rollout.max_context). "
                f"However, your messages resulted in {num_prompt_tokens} tokens. "
                "Please reduce the length of the messages."
            )
            raise self._refuse(StopReason.MAX_CONTEXT, reason, code="context_length_exceeded")
        wanted = request.max_tokens or self._config.max_turn_tokens
        max_tokens = min(wanted, self._config.max_turn_tokens, room)
        return replace(self._sampling, max_tokens=max_tokens, stop=request.stop)

    def _read(
        self, completion: Completion, request: ChatRequest, *, number: int, num_prompt_tokens: int
    ) -> tuple[Message, ChatAnswer]:
        """The message as generated, and the answer for the agent: without the stop string, thoughts separate."""
        text = self._tokenizer.assistant_text(completion.token_ids)
        cut = min((at for stop in request.stop if (at := text.find(stop)) >= 0), default=len(text))
        thinking = self._tokenizer.opens_thought
        if cut == len(text):
            parsed = self._tokenizer.parse(completion.token_ids, tools=request.tools, id_prefix=f"call_{number}")
        else:
            parsed = parse_hermes(text[:cut], id_prefix=f"call_{number}", thinking=thinking)
        calls = parsed.tool_calls[:1] if request.single_call else parsed.tool_calls
        thought, content = _split_thought(parsed.content, thinking=thinking)
        finish: Finish = "tool_calls" if calls else "stop"
        if completion.finish_reason is FinishReason.LENGTH:
            finish = "length"
        answer = ChatAnswer(
            message=Message(role="assistant", content=content, tool_calls=calls),
            thought=thought,
            finish=finish,
            num_prompt_tokens=num_prompt_tokens,
            num_completion_tokens=len(completion.token_ids),
        )
        return Message(role="assistant", content=parsed.content, tool_calls=parsed.tool_calls), answer


def _split_thought(content: str, *, thinking: bool) -> tuple[str, str]:
    """(thought, the rest). A thought that was cut short takes the whole text. `thinking`: the prompt opened it."""
    if not thinking and not content.lstrip().startswith(THINK_OPEN):
        return "", content
    thought, _, rest = content.partition(THINK_CLOSE)
    return thought.strip().removeprefix(THINK_OPEN).strip(), rest.lstrip("\n")
