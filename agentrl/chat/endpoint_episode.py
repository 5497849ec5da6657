"""Env x any chat endpoint -> trajectories without tokens: the rollout's rules, in message space, for evaluation only.

Knows nothing of tokenizers: what such a model sampled is not told, so no turn is recorded, and nothing can be trained
on it. Counts of tokens are the endpoint's; tool output is cut by characters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from agentrl import env as environments
from agentrl.chat.agent_episode import run_agent_episode
from agentrl.chat.chat_model import ChatModel, ChatRules, PromptTooLong, Reply
from agentrl.chat.forward_session import ForwardSession
from agentrl.chat.proxy import ChatProxy
from agentrl.env import Action, Env, Episode, StepResult
from agentrl.env.agent_env import AgentEnv
from agentrl.errors import ConfigError, EngineError, EnvError
from agentrl.rollout.group import Attempt, as_trajectory, play_group
from agentrl.tokens.codec import cut_chars
from agentrl.types import FinishReason, Message, StopReason, Task, Trajectory, TrajectoryGroup

CHARACTERS_PER_TOKEN = 4
"""What rollout.tool_output_tokens comes to where nobody counts tokens."""
RETRY_BACKOFF_S = 1.0
"""Wait before the first retry of an episode; doubles with each."""


async def play_chat_group(
    make_env: Callable[[], Env],
    task: Task,
    *,
    group_id: int,
    size: int,
    model: ChatModel,
    rules: ChatRules,
    seed: int,
    proxy: ChatProxy,
) -> TrajectoryGroup:
    """Play `task` `size` times at once; retries and seeds are those of a rollout. Raises InfraError, ConfigError.

    The agent of an AgentEnv talks to the model through `proxy`, by which its limits and its messages are known.
    """

    async def play(attempt: Attempt) -> tuple[Trajectory, ...]:
        env = make_env()
        if not isinstance(env, AgentEnv):
            return (await play_chat_episode(env, task, attempt, model=model, rules=rules),)
        session = ForwardSession(model=model, rules=rules, max_calls=rules.max_turns or env.max_turns)
        timeout_s = rules.limits.episode_timeout_s
        return await run_agent_episode(
            env, task, episode_id=attempt.episode_id, session=session, proxy=proxy, timeout_s=timeout_s
        )

    return await play_group(
        task,
        play,
        group_id=group_id,
        size=size,
        max_retries=rules.limits.max_retries,
        backoff_s=RETRY_BACKOFF_S,
        seed=seed,
        name=f"eval-{group_id}",
    )


async def play_chat_episode(
    env: Env, task: Task, attempt: Attempt, *, model: ChatModel, rules: ChatRules
) -> Trajectory:
    """Play one episode and score it; `env` is closed whatever happens. Raises InfraError, ConfigError."""
    talk = _Talk(env=env, model=model, rules=rules)
    started = time.monotonic()
    timeout_s = rules.limits.episode_timeout_s
    try:
        stop_reason = await talk.play(task, attempt.seed)
        episode = talk.episode(task, stop_reason, wall_s=time.monotonic() - started)
        episode = await environments.scored(env, episode, timeout_s=timeout_s)
    finally:
        await environments.close(env)
    return as_trajectory(episode, trajectory_id=attempt.episode_id, turns=())


@dataclass(kw_only=True)
class _Talk:
    """One episode under way."""

    env: Env
    model: ChatModel
    rules: ChatRules
    messages: list[Message] = field(default_factory=list)
    num_turns: int = 0
    num_tokens: int = 0  # of the whole conversation, as the endpoint counted them last
    step_reward: float = 0.0
    counts: dict[str, float] = field(
        default_factory=lambda: {"tool_calls": 0.0, "tool_errors": 0.0, "completion_tokens": 0.0}
    )

    async def play(self, task: Task, seed: int) -> StopReason:
        """Reset and turns, until something ends the episode: the wall clock does with what was said by then."""
        timeout_s = self.rules.limits.episode_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                self.messages = list(await environments.start(self.env, task, seed))
                return await self._turns(task)
        except TimeoutError:
            if self.num_turns:
                return StopReason.TIMEOUT
            late = f"task {task.id}: no turn within {timeout_s:g} s"
            raise EngineError(late) if self.messages else EnvError(f"{late}: reset did not end") from None

    def episode(self, task: Task, stop_reason: StopReason, *, wall_s: float) -> Episode:
        """What was played, not yet scored."""
        return Episode(
            task=task,
            messages=tuple(self.messages),
            stop_reason=stop_reason,
            step_reward=self.step_reward,
            info=self.counts | {"turns": self.num_turns, "wall_s": wall_s},
        )

    async def _turns(self, task: Task) -> StopReason:
        for _ in range(self.env.max_turns if self.rules.max_turns is None else self.rules.max_turns):
            try:
                reply = await self._say()
            except PromptTooLong as error:
                if not self.num_turns:
                    raise ConfigError(f"task {task.id}: its prompt does not fit the model: {error}") from error
                reply = None
            if reply is None:
                return StopReason.MAX_CONTEXT
            self._record(reply)
            if reply.finish_reason is FinishReason.LENGTH:
                return StopReason.MAX_CONTEXT
            result = await self._step(reply)
            if result.terminated or result.truncated:
                return StopReason.COMPLETED if result.terminated else StopReason.TRUNCATED
        return StopReason.MAX_TURNS

    async def _say(self) -> Reply | None:
        """The next turn; None when rollout.max_context leaves no room for one."""
        limits = self.rules.limits
        max_tokens = min(limits.max_turn_tokens, limits.max_context - self.num_tokens)
        if max_tokens < limits.min_turn_tokens:
            return None
        return await self.model.say(
            self.messages,
            self.env.tool_schemas(),
            max_tokens=max_tokens,
            temperature=self.rules.temperature,
            top_p=self.rules.top_p,
        )

    def _record(self, reply: Reply) -> None:
        self.num_turns += 1
        self.num_tokens = reply.num_prompt_tokens + reply.num_completion_tokens
        self.counts["completion_tokens"] += reply.num_completion_tokens
        self.messages.append(reply.message)

    async def _step(self, reply: Reply) -> StepResult:
        action = Action(message=reply.message, parse_errors=reply.parse_errors, finish_reason=reply.finish_reason)
        result = await environments.advance(self.env, action)
        environments.add_counts(self.counts, result.info)
        self.step_reward += result.reward
        self.messages.extend(self._shortened(result.observation))
        return result

    def _shortened(self, observation: Sequence[Message]) -> list[Message]:
        """Tool output cut; several answers of one turn share the allowance."""
        limits = self.rules.limits
        num_answers = sum(message.role == "tool" for message in observation)
        share = CHARACTERS_PER_TOKEN * limits.tool_output_tokens // max(num_answers, 1)
        share = min(share, limits.tool_output_chars or share)
        return [
            replace(message, content=_cut(message.content, share, limits.tool_output_keep))
            if message.role == "tool"
            else message
            for message in observation
        ]


def _cut(text: str, max_characters: int, keep: str) -> str:
    """At most so many characters, the note for what was cut among them."""
    if len(text) <= max_characters:
        return text
    note = f"\n[... {len(text) - max_characters}+ characters cut ...]\n"
    return cut_chars(text, max(max_characters - len(note), 2), keep=keep, note=note)
