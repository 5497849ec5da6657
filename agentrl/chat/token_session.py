"""A chat session played through an Engine by token ids, and recorded token by token: what can be trained on.

Knows no HTTP. The engine's tokens are the only record of what the model said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from agentrl.chat.openai_schema import ApiError, ChatAnswer, ChatRequest, Finish
from agentrl.chat.session import ChatSession, Record
from agentrl.config import RolloutConfig
from agentrl.engine.base import Engine
from agentrl.errors import ConfigError, EngineError, boundary
from agentrl.tokens.branches import SegmentStore
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.tokens.tool_calls import THINK_CLOSE, THINK_OPEN, parse_hermes
from agentrl.types import Completion, FinishReason, Message, Sampling, StopReason


class TokenSession(ChatSession):
    """Each call is rendered, generated and recorded; every segment of the record is one conversation.

    Args:
        sampling: temperature, top_p and stop tokens of the run, which rule whatever a call asks for.
        max_calls: answers the agent may have.
        name: begins the request ids; unique in a run.
        seed: of the episode, from which each call's is made; None: calls have none.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        tokenizer: TurnTokenizer,
        limits: RolloutConfig,
        sampling: Sampling,
        max_calls: int,
        name: str,
        seed: int | None = None,
    ) -> None:
        super().__init__(max_calls=max_calls)
        self._engine = engine
        self._tokenizer = tokenizer.speaking("hermes")  # what a chat endpoint's tools are
        self._limits = limits
        self._sampling = sampling
        self._name = name
        self._seed = seed
        self._num_begun = 0
        self.store = SegmentStore(self._tokenizer)
        """What was recorded."""

    @property
    def records(self) -> Sequence[Record]:
        """One a segment."""
        return [Record(turns=tuple(s.turns), messages=tuple(s.messages)) for s in self.store.segments]

    @property
    def messages(self) -> Sequence[Message]:
        """Of the segment with the last answer."""
        return self.store.latest.messages if self.store.latest is not None else ()

    async def _play(self, request: ChatRequest) -> ChatAnswer:
        try:
            place = self.store.place(request.messages, request.tools)
        except ConfigError as error:
            raise ApiError(400, str(error), param="messages") from error
        number, self._num_begun = self._num_begun, self._num_begun + 1
        try:
            prompt = place.prompt_ids
            sampling = replace(self._fitted(request, len(prompt)), seed=request_seed(self._seed, number))
            completion = await self._generate(prompt, sampling, request_id=f"{self._name}-{number}")
            said, answer = self._read(completion, request, number=number, num_prompt_tokens=len(prompt))
        except BaseException:
            self.store.release(place)
            raise
        self.store.commit(place, completion, said=said, shown=answer.message)
        return answer

    def _fitted(self, request: ChatRequest, num_prompt_tokens: int) -> Sampling:
        """The run's sampling with the call's own limits. Raises ApiError when the prompt leaves no room."""
        room = self._limits.max_context - num_prompt_tokens
        if room < self._limits.min_turn_tokens:
            reason = (
                f"This model's maximum context length is {self._limits.max_context} tokens (rollout.max_context). "
                f"However, your messages resulted in {num_prompt_tokens} tokens. "
                "Please reduce the length of the messages."
            )
            raise self._refuse(StopReason.MAX_CONTEXT, reason, code="context_length_exceeded")
        wished = request.max_tokens or self._limits.max_turn_tokens
        max_tokens = min(wished, self._limits.max_turn_tokens, room)
        return replace(self._sampling, max_tokens=max_tokens, stop=request.stop)

    async def _generate(self, prompt: list[int], sampling: Sampling, *, request_id: str) -> Completion:
        try:
            with boundary(EngineError, "generate"):
                completion = await self._engine.generate(prompt, sampling, request_id=request_id, session_id=self._name)
            check_completion(completion, sampling, self._tokenizer)
        except EngineError as error:
            raise self._fail(error) from error
        return completion

    def _read(
        self, completion: Completion, request: ChatRequest, *, number: int, num_prompt_tokens: int
    ) -> tuple[Message, ChatAnswer]:
        """What the model said, and what the agent is shown of it: no stop string, and its thoughts apart."""
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


def request_seed(episode_seed: int | None, number: int) -> int | None:
    """For the `number`-th request of an episode: the same whenever and wherever the episode is played."""
    if episode_seed is None:
        return None
    digest = hashlib.blake2b(f"{episode_seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # vLLM takes 63 bits


def check_completion(completion: Completion, sampling: Sampling, tokenizer: TurnTokenizer) -> None:
    """Raises EngineError for an answer that cannot be one to what was asked."""
    ids = completion.token_ids
    if completion.finish_reason is FinishReason.ABORT:
        raise EngineError(f"the engine aborted the request after {len(ids)} tokens")
    if not ids:
        raise EngineError("the engine returned no token")
    if len(ids) > sampling.max_tokens:
        raise EngineError(f"the engine returned {len(ids)} tokens, {sampling.max_tokens} were allowed")
    if completion.finish_reason is FinishReason.STOP and ids[-1] not in sampling.stop_token_ids:
        text = tokenizer.decode(ids)
        if not any(stop in text for stop in sampling.stop):
            raise EngineError(f"the engine stopped at token {ids[-1]}, which ends no turn and no stop string")


def _split_thought(content: str, *, thinking: bool) -> tuple[str, str]:
    """(thought, the rest). A thought that was cut short is all there is. `thinking`: the prompt opened it."""
    if not thinking and not content.lstrip().startswith(THINK_OPEN):
        return "", content
    thought, _, rest = content.partition(THINK_CLOSE)
    return thought.strip().removeprefix(THINK_OPEN).strip(), rest.lstrip("\n")
