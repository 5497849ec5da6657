"""Requests of one episode to the engine: each has an id, a seed and a checked answer.

Independent of environments and of how prompts are made.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from agentrl.engine.base import Engine
from agentrl.errors import EngineError, boundary
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Completion, FinishReason, Sampling


class TokenGenerator:
    """Asks an engine for the completions of one session.

        generator = TokenGenerator(engine, tokenizer, session_id="train-7-0-0", seed=None)
        completion = await generator.generate(prompt_ids, sampling)

    Args:
        session_id: unique in a run; begins the request ids.
        seed: of the episode, from which each request's seed is made; None: requests have no seed.
    """

    def __init__(self, engine: Engine, tokenizer: TurnTokenizer, *, session_id: str, seed: int | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._session_id = session_id
        self._seed = seed
        self.num_requests = 0
        """Requests begun so far."""
        self.generate_s = 0.0
        """Time spent waiting for answers, summed over requests."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids` ([T]). Raises EngineError when the engine fails or its answer cannot be right."""
        number, self.num_requests = self.num_requests, self.num_requests + 1
        if self._seed is not None:
            sampling = replace(sampling, seed=request_seed(self._seed, number))
        started, asked_at = time.monotonic(), time.time()
        with boundary(EngineError, "generate"):
            completion = await self._engine.generate(
                prompt_ids, sampling, request_id=f"{self._session_id}-{number}", session_id=self._session_id
            )
        self.generate_s += time.monotonic() - started
        check_completion(completion, sampling, self._tokenizer)
        return _timed(completion, asked_at, time.time())


def _timed(completion: Completion, asked_at: float, answered_at: float) -> Completion:
    """The same with its times, to the millisecond. Not `replace`, which would check every token once more."""
    found = copy(completion)
    object.__setattr__(found, "times", (round(asked_at, 3), round(answered_at, 3)))
    return found


def request_seed(episode_seed: int, number: int) -> int:
    """The seed of an episode's `number`-th request: the same whenever and wherever the episode is played."""
    digest = hashlib.blake2b(f"{episode_seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # vLLM takes 63 bits


def check_completion(completion: Completion, sampling: Sampling, tokenizer: TurnTokenizer) -> None:
    """Raises EngineError for a completion that does not fit its request."""
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
