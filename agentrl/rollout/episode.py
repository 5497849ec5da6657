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
from agentrl.chat.agent_episode import run_agent_episode
from agentrl.chat.proxy import ChatProxy
from agentrl.chat.token_session import TokenSession, check_completion, request_seed
from agentrl.config import RolloutConfig
from agentrl.engine.base import Engine
from agentrl.env import Action, Env, Episode, StepResult
from agentrl.env.agent_env import AgentEnv
from agentrl.errors import ConfigError, EngineError, EnvError, boundary
from agentrl.rollout.group import Attempt, as_trajectory, play_group
from agentrl.rollout.outcome import judged
from agentrl.tokens.context_window import Window
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import (
    Completion,
    FinishReason,
    Message,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    TrajectoryGroup,
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
    request_seeds: bool = False,
    name: str | None = None,
    proxy: ChatProxy | None = None,
) -> TrajectoryGroup:
    """Play `task` `size` times at once, each in an environment of its own.

    An episode that fails for infrastructure is run again up to `limits.max_retries` times; then its error is raised
    and the other episodes are cancelled: a group is whole or is none. With `request_seeds` every request has a seed
    made of `seed`, the task, the group, the member and the request's place: an episode played again, after a failure
    or in another process, asks for the same tokens. `name` prefixes the ids (default: `group_id`).
    `proxy` serves the agents of an AgentEnv, whose episodes may come to several trajectories; None makes one.
    Raises InfraError, ConfigError.
    """

    parts: dict[str, Any] = {"engine": engine, "tokenizer": tokenizer, "limits": limits, "max_turns": max_turns}
    parts |= {"temperature": temperature, "top_p": top_p, "request_seeds": request_seeds}

    async def play(attempt: Attempt) -> tuple[Trajectory, ...]:
        env = make_env()
        if isinstance(env, AgentEnv):
            return await _play_agent(env, task, attempt, proxy=proxy or ChatProxy(), **parts)
        identity: dict[str, Any] = {"episode_id": attempt.episode_id, "attempt": attempt.number, "seed": attempt.seed}
        return await run_episode(env, task, **parts, **identity)

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


async def _play_agent(
    env: AgentEnv,
    task: Task,
    attempt: Attempt,
    *,
    proxy: ChatProxy,
    engine: Engine,
    tokenizer: TurnTokenizer,
    limits: RolloutConfig,
    max_turns: int | None,
    temperature: float | None,
    top_p: float | None,
    request_seeds: bool,
) -> tuple[Trajectory, ...]:
    """One episode of an agent that asks for its turns itself: they are bounded, sampled and recorded by its session."""
    session = TokenSession(
        engine=engine,
        tokenizer=tokenizer,
        limits=limits,
        sampling=_sampling(limits, tokenizer, temperature=temperature, top_p=top_p),
        max_calls=env.max_turns if max_turns is None else max_turns,
        name=attempt.name,
        seed=attempt.seed if request_seeds else None,
    )
    segments = await run_agent_episode(
        env,
        task,
        episode_id=attempt.episode_id,
        session=session,
        proxy=proxy,
        timeout_s=limits.episode_timeout_s,
    )
    return judged(segments, limits)


def _sampling(
    limits: RolloutConfig,
    tokenizer: TurnTokenizer,
    *,
    temperature: float | None,
    top_p: float | None,
    stop: tuple[str, ...] = (),
) -> Sampling:
    return Sampling(
        max_tokens=limits.max_turn_tokens,
        temperature=limits.temperature if temperature is None else temperature,
        top_p=limits.top_p if top_p is None else top_p,
        stop_token_ids=tokenizer.stop_token_ids,
        stop=stop,
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
    request_seeds: bool = False,
) -> tuple[Trajectory, ...]:
    """Play one episode and score it; `env` is closed whatever happens.

    Returns one trajectory, or the segments of an episode whose context was compacted (ids EPISODE.SEGMENT), oldest
    first, each with the reward of the whole and its share in the gradient.

    Args:
        max_turns: turn budget; None takes the environment's own.
        temperature, top_p: None takes those of `limits`.
        attempt: part of the request ids, which are thus unique over retries.
        request_seeds: each request has a seed of its own, made of `seed`.

    Raises EnvError, SandboxError, EngineError when a part failed; ConfigError when the prompt does not fit.
    """
    tokenizer = tokenizer.speaking(limits.tool_format)
    tools = env.tool_schemas()
    stop = tokenizer.format.stop if tools else ()
    player = _Player(
        env=env,
        engine=engine,
        tokenizer=tokenizer,
        limits=limits,
        sampling=_sampling(limits, tokenizer, temperature=temperature, top_p=top_p, stop=stop),
        max_turns=env.max_turns if max_turns is None else max_turns,
        request_prefix=f"{episode_id}-{attempt}",
        seed=seed if request_seeds else None,
        tools=tools,
        window=Window(tokenizer, limits, tools),
    )
    started = time.monotonic()
    try:
        await player.begin(task, seed)
        stop_reason = await player.play()
        episode = player.episode(task, stop_reason, wall_s=time.monotonic() - started)
        episode = await environments.scored(env, episode, timeout_s=limits.episode_timeout_s)
    finally:
        await environments.close(env)
    return judged(_trajectories(player.window, episode, episode_id), limits)


def _trajectories(window: Window, episode: Episode, episode_id: str) -> list[Trajectory]:
    """One a segment in which the model spoke."""
    spoken = [segment for segment in window.segments if segment.turns]
    if len(spoken) == 1:
        return [as_trajectory(episode, trajectory_id=episode_id, turns=tuple(spoken[0].turns))]
    return [
        replace(
            as_trajectory(episode, trajectory_id=f"{episode_id}.{number}", turns=tuple(segment.turns)),
            messages=tuple(segment.messages),
        )
        for number, segment in enumerate(spoken)
    ]


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
    seed: int | None
    tools: Sequence[dict[str, Any]]
    window: Window
    messages: list[Message] = field(default_factory=list)
    """All that was said, whatever the model is shown of it."""
    step_reward: float = 0.0
    num_generated: int = 0
    counts: dict[str, float] = field(
        default_factory=lambda: {"tool_calls": 0.0, "tool_errors": 0.0, "tool_s": 0.0, "generate_s": 0.0}
    )

    async def begin(self, task: Task, seed: int) -> None:
        """Reset the environment and render the opening."""
        try:
            async with asyncio.timeout(self.limits.episode_timeout_s):
                self.messages = list(await environments.start(self.env, task, seed))
        except TimeoutError as error:
            raise EnvError(f"reset of task {task.id} took more than {self.limits.episode_timeout_s} s") from error
        self.window.open(self.messages)
        if self.window.num_tokens + self.limits.min_turn_tokens > self.limits.max_context:
            raise ConfigError(
                f"task {task.id}: its prompt has {self.window.num_tokens} tokens, which leaves no room in "
                f"rollout.max_context={self.limits.max_context}; raise it or drop the task"
            )

    async def play(self) -> StopReason:
        """Turns until something ends the episode. The wall clock ends it with what was finished by then."""
        try:
            async with asyncio.timeout(self.limits.episode_timeout_s):
                return await self._turns()
        except TimeoutError:
            if not self.window.segments[0].turns:
                raise EngineError(f"no turn was generated within {self.limits.episode_timeout_s} s") from None
            return StopReason.TIMEOUT

    def episode(self, task: Task, stop_reason: StopReason, *, wall_s: float) -> Episode:
        """What was played, not yet scored."""
        segments = [segment for segment in self.window.segments if segment.turns]
        counts = {"turns": sum(len(segment.turns) for segment in segments), "segments": len(segments), "wall_s": wall_s}
        return Episode(
            task=task,
            messages=tuple(self.messages),
            stop_reason=stop_reason,
            step_reward=self.step_reward,
            info=self.counts | counts,
        )

    async def _turns(self) -> StopReason:
        for turn in range(self.max_turns):
            if self.window.is_nearly_full:
                await self._compact()
            max_tokens = self._budget(is_last=turn == self.max_turns - 1)
            if max_tokens < self.limits.min_turn_tokens:
                return StopReason.MAX_CONTEXT
            completion, action = await self._speak(max_tokens, id_prefix=f"call_{turn}")
            self.messages.append(action.message)
            if completion.finish_reason is FinishReason.LENGTH:
                return StopReason.MAX_CONTEXT
            result = await self._step(action)
            if result.terminated or result.truncated:
                self.messages.extend(self.window.cut(result.observation))
                return StopReason.COMPLETED if result.terminated else StopReason.TRUNCATED
            self.messages.extend(self.window.observe(result.observation))
        return StopReason.MAX_TURNS

    def _room(self) -> int:
        return self.limits.max_context - self.window.num_tokens

    def _budget(self, *, is_last: bool) -> int:
        """Tokens this turn may have: what is left, less room for a tool's answer where one can follow."""
        reserve = 0 if is_last or not self.tools else self.limits.tool_output_tokens
        if self._room() - reserve < self.limits.min_turn_tokens:
            reserve = 0  # a last word without the possibility of an answer
        return min(self.limits.max_turn_tokens, self._room() - reserve)

    async def _compact(self) -> None:
        """Make room. Notes that do not fit any more are not asked for: the budget then ends the episode."""
        if self.limits.compaction == "drop":
            self.window.drop_old()
            return
        self.window.ask_for_summary()
        max_tokens = min(self.limits.max_turn_tokens, self._room())
        if max_tokens >= self.limits.min_turn_tokens:
            await self._speak(max_tokens, id_prefix="note")
            self.window.take_summary()

    async def _speak(self, max_tokens: int, *, id_prefix: str) -> tuple[Completion, Action]:
        """One turn of the model, recorded and read."""
        completion = await self._generate(max_tokens)
        parsed = self.tokenizer.parse(completion.token_ids, tools=self.tools, id_prefix=id_prefix)
        message = Message(role="assistant", content=parsed.content, tool_calls=parsed.tool_calls)
        self.window.record(completion, message)
        return completion, Action(message=message, parse_errors=parsed.errors, finish_reason=completion.finish_reason)

    async def _generate(self, max_tokens: int) -> Completion:
        sampling = self.sampling
        if max_tokens != sampling.max_tokens or self.seed is not None:
            sampling = replace(sampling, max_tokens=max_tokens, seed=request_seed(self.seed, self.num_generated))
        request_id = f"{self.request_prefix}-{self.num_generated}"
        self.num_generated += 1
        started = time.monotonic()
        with boundary(EngineError, "generate"):
            completion = await self.engine.generate(
                self.window.prompt(), sampling, request_id=request_id, session_id=self.request_prefix
            )
        self.counts["generate_s"] += time.monotonic() - started
        check_completion(completion, sampling, self.tokenizer)
        return completion

    async def _step(self, action: Action) -> StepResult:
        result = await environments.advance(self.env, action)
        environments.add_counts(self.counts, result.info)
        self.step_reward += result.reward
        return result
