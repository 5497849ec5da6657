"""Env x Engine -> Trajectory; G of them -> TrajectoryGroup. Token budgets, stop reasons, retries.

Knows nothing of HTTP, staleness or learners. A Trajectory exists only for an episode in which every part worked:
whatever fails of the infrastructure raises.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl import env as environments
from agentrl.agent_env import AgentEnv
from agentrl.agent_rollout import run_agent_episode
from agentrl.config import RolloutConfig
from agentrl.engine import Engine
from agentrl.env import Action, Env, Episode, StepResult
from agentrl.errors import ConfigError, EngineError, EnvError, boundary
from agentrl.group import Attempt, as_trajectory, play_group
from agentrl.parsers import parse_hermes
from agentrl.proxy import ChatProxy
from agentrl.renderer import TurnTokenizer
from agentrl.token_session import TokenSession
from agentrl.types import (
    Completion,
    FinishReason,
    Message,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

RETRY_BACKOFF_S = 0.5
"""Wait before the first retry of an episode; doubles with each."""


async def run_group(
    make_env: Callable[[], Env],
    task: Task,
    *,
    group_id: int,
    size: int,
    engine: Engine,
    tokenizer: TurnTokenizer,
    limits: RolloutConfig,
    max_turns: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int = 0,
    name: str | None = None,
    proxy: ChatProxy | None = None,
) -> TrajectoryGroup:
    """Play `task` `size` times at once, each in an environment of its own.

    An episode that fails for infrastructure is run again up to `limits.max_retries` times; then its error is raised
    and the other episodes are cancelled: a group is whole or is none. `name` prefixes the ids (default: `group_id`).
    `proxy` serves the agents of an AgentEnv, whose episodes may come to several trajectories; None makes one.
    Raises InfraError, ConfigError.
    """

    parts: dict[str, Any] = {"engine": engine, "tokenizer": tokenizer, "limits": limits}

    async def play(attempt: Attempt) -> tuple[Trajectory, ...]:
        env = make_env()
        if isinstance(env, AgentEnv):
            sampling = _sampling(limits, tokenizer, temperature=temperature, top_p=top_p)
            max_calls = env.max_turns if max_turns is None else max_turns
            session = TokenSession(**parts, sampling=sampling, max_calls=max_calls, name=attempt.name)
            return await run_agent_episode(
                env,
                task,
                episode_id=attempt.episode_id,
                session=session,
                proxy=proxy or ChatProxy(),
                timeout_s=limits.episode_timeout_s,
            )
        rules: dict[str, Any] = {"max_turns": max_turns, "temperature": temperature, "top_p": top_p}
        identity: dict[str, Any] = {"episode_id": attempt.episode_id, "attempt": attempt.number, "seed": attempt.seed}
        return (await run_episode(env, task, **parts, **rules, **identity),)

    return await play_group(
        task,
        play,
        group_id=group_id,
        size=size,
        max_retries=limits.max_retries,
        backoff_s=RETRY_BACKOFF_S,
        seed=seed,
        name=str(group_id) if name is None else name,
    )


def _sampling(
    limits: RolloutConfig, tokenizer: TurnTokenizer, *, temperature: float | None, top_p: float | None
) -> Sampling:
    return Sampling(
        max_tokens=limits.max_turn_tokens,
        temperature=limits.temperature if temperature is None else temperature,
        top_p=limits.top_p if top_p is None else top_p,
        stop_token_ids=tokenizer.stop_token_ids,
    )


async def run_episode(
    env: Env,
    task: Task,
    *,
    engine: Engine,
    tokenizer: TurnTokenizer,
    limits: RolloutConfig,
    episode_id: str,
    seed: int,
    max_turns: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    attempt: int = 0,
) -> Trajectory:
    """Play one episode and score it; `env` is closed whatever happens.

    Args:
        max_turns: turn budget; None takes the environment's own.
        temperature, top_p: None takes those of `limits`.
        attempt: part of the request ids, which are thus unique over retries.

    Raises EnvError, SandboxError, EngineError when a part failed; ConfigError when the prompt does not fit.
    """
    sampling = _sampling(limits, tokenizer, temperature=temperature, top_p=top_p)
    player = _Player(
        env=env,
        engine=engine,
        tokenizer=tokenizer,
        limits=limits,
        sampling=sampling,
        max_turns=env.max_turns if max_turns is None else max_turns,
        request_prefix=f"{episode_id}-{attempt}",
    )
    started = time.monotonic()
    try:
        await player.begin(task, seed)
        stop_reason = await player.play()
        episode = player.episode(task, stop_reason, wall_s=time.monotonic() - started)
        episode = await environments.scored(env, episode, timeout_s=limits.episode_timeout_s)
    finally:
        await environments.close(env)
    return as_trajectory(episode, trajectory_id=episode_id, turns=tuple(player.turns))


@dataclass(kw_only=True)
class _Player:
    """The state of one episode under way."""

    env: Env
    engine: Engine
    tokenizer: TurnTokenizer
    limits: RolloutConfig
    sampling: Sampling
    max_turns: int
    request_prefix: str
    messages: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # all so far: prompts, completions, observations
    turns: list[Turn] = field(default_factory=list)
    step_reward: float = 0.0
    counts: dict[str, float] = field(
        default_factory=lambda: {"tool_calls": 0.0, "tool_errors": 0.0, "tool_s": 0.0, "generate_s": 0.0}
    )
    _seen: list[int] = field(default_factory=list)  # observation tokens the model has not answered yet

    async def begin(self, task: Task, seed: int) -> None:
        """Reset the environment and render the opening."""
        try:
            async with asyncio.timeout(self.limits.episode_timeout_s):
                self.messages = await environments.start(self.env, task, seed)
        except TimeoutError as error:
            raise EnvError(f"reset of task {task.id} took more than {self.limits.episode_timeout_s} s") from error
        self._seen = self.tokenizer.first_prompt(self.messages, self.env.tool_schemas())
        if len(self._seen) + self.limits.min_turn_tokens > self.limits.max_context:
            raise ConfigError(
                f"task {task.id}: its prompt has {len(self._seen)} tokens, which leaves no room in "
                f"rollout.max_context={self.limits.max_context}; raise it or drop the task"
            )

    async def play(self) -> StopReason:
        """Turns until something ends the episode. The wall clock ends it with what was finished by then."""
        try:
            async with asyncio.timeout(self.limits.episode_timeout_s):
                return await self._turns()
        except TimeoutError:
            if not self.turns:
                raise EngineError(f"no turn was generated within {self.limits.episode_timeout_s} s") from None
            return StopReason.TIMEOUT

    def episode(self, task: Task, stop_reason: StopReason, *, wall_s: float) -> Episode:
        """What was played, not yet scored."""
        return Episode(
            task=task,
            messages=tuple(self.messages),
            stop_reason=stop_reason,
            step_reward=self.step_reward,
            info=self.counts | {"turns": len(self.turns), "wall_s": wall_s},
        )

    async def _turns(self) -> StopReason:
        for turn in range(self.max_turns):
            max_tokens = self._budget(is_last=turn == self.max_turns - 1)
            if max_tokens < self.limits.min_turn_tokens:
                return StopReason.MAX_CONTEXT
            completion = await self._generate(turn, max_tokens)
            action = self._record(turn, completion)
            if completion.finish_reason is FinishReason.LENGTH:
                return StopReason.MAX_CONTEXT
            result = await self._step(action)
            if result.terminated or result.truncated:
                self.messages.extend(self._shortened(result.observation))
                return StopReason.COMPLETED if result.terminated else StopReason.TRUNCATED
            self._observe(result.observation, completion)
        return StopReason.MAX_TURNS

    def _budget(self, *, is_last: bool) -> int:
        """Tokens this turn may have: what is left, less room for a tool's answer where one can follow."""
        left = self.limits.max_context - len(self.token_ids) - len(self._seen)
        reserve = 0 if is_last or not self.env.tools else self.limits.tool_output_tokens
        if left - reserve < self.limits.min_turn_tokens:
            reserve = 0  # a last word without the possibility of an answer
        return min(self.limits.max_turn_tokens, left - reserve)

    async def _generate(self, turn: int, max_tokens: int) -> Completion:
        prompt = self.token_ids + self._seen
        self._check_prefix(prompt)
        sampling = replace(self.sampling, max_tokens=max_tokens)
        started = time.monotonic()
        with boundary(EngineError, "generate"):
            completion = await self.engine.generate(prompt, sampling, request_id=f"{self.request_prefix}-{turn}")
        self.counts["generate_s"] += time.monotonic() - started
        _check_completion(completion, max_tokens, self.tokenizer.stop_token_ids)
        return completion

    def _check_prefix(self, prompt: Sequence[int]) -> None:
        """The invariant of the token path: a prompt is the one before, what was said to it, and something new."""
        position = 0
        for turn in self.turns:
            for ids in (turn.observation_ids, turn.completion.token_ids):
                if tuple(prompt[position : position + len(ids)]) != ids:
                    raise AssertionError(f"{self.request_prefix}: the prompt does not extend the recorded turns")
                position += len(ids)

    def _record(self, turn: int, completion: Completion) -> Action:
        """Append what was prompted and said, and read it."""
        self.turns.append(Turn(observation_ids=tuple(self._seen), completion=completion))
        self.token_ids += [*self._seen, *completion.token_ids]
        self._seen = []
        text = self.tokenizer.assistant_text(completion.token_ids)
        parsed = parse_hermes(text, id_prefix=f"call_{turn}", thinking=self.tokenizer.opens_thought)
        message = Message(role="assistant", content=parsed.content, tool_calls=parsed.tool_calls)
        self.messages.append(message)
        return Action(message=message, parse_errors=parsed.errors, finish_reason=completion.finish_reason)

    async def _step(self, action: Action) -> StepResult:
        result = await environments.advance(self.env, action)
        environments.add_counts(self.counts, result.info)
        self.step_reward += result.reward
        return result

    def _observe(self, observation: Sequence[Message], previous: Completion) -> None:
        shown = self._shortened(observation)
        self.messages.extend(shown)
        self._seen = self.tokenizer.observation(shown, previous=previous.token_ids)

    def _shortened(self, observation: Sequence[Message]) -> list[Message]:
        """Tool output cut in tokens; several answers of one turn share the allowance."""
        num_answers = sum(message.role == "tool" for message in observation)
        share = self.limits.tool_output_tokens // max(num_answers, 1)
        return [
            replace(message, content=self.tokenizer.truncate(message.content, share))
            if message.role == "tool"
            else message
            for message in observation
        ]


def _check_completion(completion: Completion, max_tokens: int, stop_token_ids: Sequence[int]) -> None:
    """Raises EngineError for an answer that cannot be one to what was asked."""
    ids = completion.token_ids
    if completion.finish_reason is FinishReason.ABORT:
        raise EngineError(f"the engine aborted the request after {len(ids)} tokens")
    if not ids:
        raise EngineError("the engine returned no token")
    if len(ids) > max_tokens:
        raise EngineError(f"the engine returned {len(ids)} tokens, {max_tokens} were allowed")
    if completion.finish_reason is FinishReason.STOP and ids[-1] not in stop_token_ids:
        raise EngineError(f"the engine stopped at token {ids[-1]}, which is none of {tuple(stop_token_ids)}")
