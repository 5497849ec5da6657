"""A model that speaks by token ids: the prompt only grows, and what the engine sampled is the only record of it.

Independent of environments: it receives messages and returns actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.config import RolloutConfig
from agentrl.engine.base import Engine
from agentrl.env import Action, Env, StepResult
from agentrl.rollouts.env_runner import EnvRunner
from agentrl.rollouts.episode import SegmentRecord
from agentrl.rollouts.generation import TokenGenerator
from agentrl.rollouts.long_prompts import refuse_too_long
from agentrl.rollouts.settings import Attempt, RolloutSettings
from agentrl.tokens.context_window import ContextWindow
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Message, Sampling, Task


def token_runner(
    env: Env, attempt: Attempt, engine: Engine, settings: RolloutSettings, tokenizer: TurnTokenizer
) -> EnvRunner:
    """An attempt at an episode of `env`, played by token ids."""
    config, tools = settings.config, env.tool_schemas()
    tokenizer = tokenizer.with_tool_format(config.tool_format)
    speaker = TokenSpeaker(
        TokenGenerator(engine, tokenizer, session_id=attempt.session_id, seed=settings.request_seed(attempt)),
        tokenizer=tokenizer,
        tools=tools,
        sampling=settings.sampling(tokenizer, stop=tokenizer.format.stop if tools else ()),
        config=config,
    )
    return EnvRunner(
        env,
        attempt.task,
        speaker,
        max_turns=settings.turn_budget(env),
        reset_timeout_s=config.episode_timeout_s,
    )


class TokenSpeaker:
    """A ModelSpeaker over an engine and a context window.

    speaker = TokenSpeaker(generator, tokenizer=tokenizer, tools=(), sampling=sampling, config=config)
    speaker.open(task, [user("What is 2 + 2?")])
    action = await speaker.speak(0, is_last=True)
    """

    def __init__(
        self,
        generator: TokenGenerator,
        *,
        tokenizer: TurnTokenizer,
        tools: Sequence[dict[str, Any]],
        sampling: Sampling,
        config: RolloutConfig,
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._tools = tools
        self._sampling = sampling
        self._config = config
        self._window = ContextWindow(tokenizer, config, tools)

    @property
    def segments(self) -> Sequence[SegmentRecord]:
        """See ModelSpeaker: the segments in which the model spoke."""
        return [
            SegmentRecord(turns=tuple(segment.turns), messages=tuple(segment.messages))
            for segment in self._window.segments
            if segment.turns
        ]

    @property
    def counts(self) -> Mapping[str, float]:
        """See ModelSpeaker."""
        return {"generate_s": self._generator.generate_s}

    def open(self, task: Task, messages: Sequence[Message]) -> None:
        """See ModelSpeaker."""
        self._window.open(messages)
        refuse_too_long(task, self._window.num_tokens, self._config)

    async def speak(self, turn: int, *, is_last: bool) -> Action | None:
        """See Speaker."""
        if self._window.is_nearly_full:
            await self._compact()
        max_tokens = self._budget(is_last=is_last)
        if max_tokens < self._config.min_turn_tokens:
            return None
        return await self._say(max_tokens, id_prefix=f"call_{turn}")

    def observe(self, result: StepResult) -> Sequence[Message]:
        """See Speaker. The last observation is cut like the others, but nothing is prompted with it."""
        if result.terminated or result.truncated:
            return self._window.cut(result.observation)
        return self._window.observe(result.observation)

    def _room(self) -> int:
        return self._config.max_context - self._window.num_tokens

    def _budget(self, *, is_last: bool) -> int:
        """Tokens this turn may have: what is left, minus room for a tool's answer if one can follow."""
        reserve = 0 if is_last or not self._tools else self._config.tool_output_tokens
        if self._room() - reserve < self._config.min_turn_tokens:
            reserve = 0  # the last turn; no answer can follow
        return min(self._config.max_turn_tokens, self._room() - reserve)

    async def _compact(self) -> None:
        """Make room. Notes that do not fit any more are not asked for: the budget then ends the episode."""
        if self._config.compaction == "drop":
            self._window.drop_old()
            return
        self._window.ask_for_summary()
        max_tokens = min(self._config.max_turn_tokens, self._room())
        if max_tokens >= self._config.min_turn_tokens:
            await self._say(max_tokens, id_prefix="note")
            self._window.take_summary()

    async def _say(self, max_tokens: int, *, id_prefix: str) -> Action:
        """Generate one turn, record it and parse it."""
        sampling = self._sampling
        if max_tokens != sampling.max_tokens:
            sampling = replace(sampling, max_tokens=max_tokens)
        completion = await self._generator.generate(self._window.prompt(), sampling)
        parsed = self._tokenizer.parse(completion.token_ids, tools=self._tools, id_prefix=id_prefix)
        message = Message(role="assistant", content=parsed.content, tool_calls=parsed.tool_calls)
        self._window.record(completion, message)
        return Action(
            message=message,
            parse_errors=parsed.errors,
            finish_reason=completion.finish_reason,
            cut_by=self._config.limit_of(len(completion.token_ids)),
        )
