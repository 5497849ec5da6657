"""One episode's chat: calls in, answers out, each played through the Engine and recorded. Knows no HTTP.

Limits are the run's: a call that does not fit, or one too many, is refused; the session remembers why, since an agent
that gives up then has come to an end and has not failed. A failure of the engine ends the session.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from agentrl.chat_wire import ApiError, ChatAnswer, ChatRequest, Finish
from agentrl.config import RolloutConfig
from agentrl.engine import Engine
from agentrl.errors import ConfigError, EngineError, boundary
from agentrl.parsers import parse_hermes
from agentrl.renderer import TurnTokenizer
from agentrl.segments import SegmentStore
from agentrl.types import Completion, FinishReason, Message, Sampling, StopReason

log = logging.getLogger(__name__)

MIN_TURN_TOKENS = 16
"""A turn with less room than this is not begun."""


class ChatSession:
    """Answers the calls of one agent; they may overlap.

    Args:
        sampling: temperature, top_p and stop tokens of the run, which rule whatever a call asks for.
        max_calls: answers the agent may have.
        name: begins the request ids; unique in a run.
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
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._limits = limits
        self._sampling = sampling
        self._max_calls = max_calls
        self._name = name
        self._num_begun = 0
        self._num_running = 0
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.store = SegmentStore(tokenizer)
        self.num_answers = 0
        self.num_tool_calls = 0
        self.generate_s = 0.0
        self.refusal: tuple[StopReason, str] | None = None
        """Why a call was refused for the run's limits, if one was."""

    @property
    def has_calls_running(self) -> bool:
        """Whether an answer is being generated."""
        return self._num_running > 0

    async def failure(self) -> None:
        """Waits for the engine to fail. Raises EngineError when it does; never returns."""
        await asyncio.shield(self._failed)

    def raise_failure(self) -> None:
        """Raises EngineError if the engine has failed."""
        if self._failed.done():
            self._failed.result()

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Play one call. Cancelling it aborts the request in the engine, and nothing of it is recorded.

        Raises ApiError: 400 for what the agent can mend, 500 once the engine has failed.
        """
        if self._failed.done():
            raise _gone()
        if self.num_answers + self._num_running >= self._max_calls:
            reason = f"the episode has had its {self._max_calls} calls"
            raise self._refuse(StopReason.MAX_TURNS, reason, code="max_turns_exceeded")
        try:
            place = self.store.place(request.messages, request.tools)
        except ConfigError as error:
            raise ApiError(400, str(error), param="messages") from error
        self._num_running += 1
        try:
            prompt = place.prompt_ids
            completion = await self._generate(prompt, self._fitted(request, len(prompt)))
            answer = self._read(completion, request, num_prompt_tokens=len(prompt))
        except BaseException:
            self.store.release(place)
            raise
        finally:
            self._num_running -= 1
        self.store.commit(place, completion, answer.message)
        self.num_answers += 1
        self.num_tool_calls += len(answer.message.tool_calls)
        return answer

    def _fitted(self, request: ChatRequest, num_prompt_tokens: int) -> Sampling:
        """The run's sampling with the call's own limits. Raises ApiError when the prompt leaves no room."""
        room = self._limits.max_context - num_prompt_tokens
        if room < min(MIN_TURN_TOKENS, self._limits.max_turn_tokens):
            reason = (
                f"This model's maximum context length is {self._limits.max_context} tokens (rollout.max_context). "
                f"However, your messages resulted in {num_prompt_tokens} tokens. "
                "Please reduce the length of the messages."
            )
            raise self._refuse(StopReason.MAX_CONTEXT, reason, code="context_length_exceeded")
        wished = request.max_tokens or self._limits.max_turn_tokens
        max_tokens = min(wished, self._limits.max_turn_tokens, room)
        return replace(self._sampling, max_tokens=max_tokens, stop=request.stop)

    async def _generate(self, prompt: list[int], sampling: Sampling) -> Completion:
        request_id = f"{self._name}-{self._num_begun}"
        self._num_begun += 1
        started = time.monotonic()
        try:
            with boundary(EngineError, "generate"):
                completion = await self._engine.generate(prompt, sampling, request_id=request_id)
            self._check(completion, sampling)
            return completion
        except EngineError as error:
            if not self._failed.done():
                self._failed.set_exception(error)
                self._failed.exception()  # an episode that has ended meanwhile does not ask
            raise _gone() from error
        finally:
            self.generate_s += time.monotonic() - started

    def _check(self, completion: Completion, sampling: Sampling) -> None:
        """Raises EngineError for a completion that cannot be one to what was asked."""
        ids = completion.token_ids
        if completion.finish_reason is FinishReason.ABORT:
            raise EngineError(f"the engine aborted the request after {len(ids)} tokens")
        if not 0 < len(ids) <= sampling.max_tokens:
            raise EngineError(f"the engine returned {len(ids)} tokens, 1 to {sampling.max_tokens} were allowed")
        if completion.finish_reason is FinishReason.STOP and ids[-1] not in sampling.stop_token_ids:
            text = self._tokenizer.decode(ids)
            if not any(stop in text for stop in sampling.stop):
                raise EngineError(f"the engine stopped at token {ids[-1]}, which ends no turn and no stop string")

    def _read(self, completion: Completion, request: ChatRequest, *, num_prompt_tokens: int) -> ChatAnswer:
        text = self._tokenizer.assistant_text(completion.token_ids)
        cut = min((at for stop in request.stop if (at := text.find(stop)) >= 0), default=len(text))
        thinking = self._tokenizer.opens_thought
        parsed = parse_hermes(text[:cut], id_prefix=f"call_{self._num_begun}", thinking=thinking)
        calls = parsed.tool_calls[:1] if request.single_call else parsed.tool_calls
        finish: Finish = "tool_calls" if calls else "stop"
        if completion.finish_reason is FinishReason.LENGTH:
            finish = "length"
        return ChatAnswer(
            message=Message(role="assistant", content=parsed.content, tool_calls=calls),
            finish=finish,
            num_prompt_tokens=num_prompt_tokens,
            num_completion_tokens=len(completion.token_ids),
        )

    def _refuse(self, stop_reason: StopReason, reason: str, *, code: str) -> ApiError:
        self.refusal = (stop_reason, reason)
        return ApiError(400, reason, code=code, param="messages")


def _gone() -> ApiError:
    return ApiError(500, "the engine failed; this episode is over and will be played again", code="engine_failed")
