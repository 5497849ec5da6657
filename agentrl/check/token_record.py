"""Plays scripted episodes token by token, as a rollout does, and looks whether the record only ever grows.

Needs no model: a scripted engine speaks, in bytes unless another tokenizer is given.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from agentrl.check.byte_tokenizer import write_byte_tokenizer
from agentrl.config import RolloutConfig
from agentrl.env.base import Env
from agentrl.rollout.episode import play_episode
from agentrl.rollout.settings import Attempt, RolloutSettings
from agentrl.rollout.token_speaker import token_runner
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Message, Task, Trajectory

_CONFIG = RolloutConfig(max_context=2**20, max_turn_tokens=2**18, tool_output_tokens=2**17)


def load_tokenizer(path: str | None) -> TurnTokenizer:
    """That of a model, or bytes with ChatML turns. Raises ConfigError."""
    if path is not None:
        return TurnTokenizer.load(path)
    with tempfile.TemporaryDirectory(prefix="agentrl-bytes-") as folder:
        return TurnTokenizer.load(str(write_byte_tokenizer(Path(folder))))


async def find_token_problem(
    make_env: Callable[[], Env], task: Task, script: Sequence[Message], tokenizer: TurnTokenizer
) -> tuple[int, str | None]:
    """Tokens played, and what is wrong with them, if anything. Raises InfraError, ConfigError as a rollout does."""
    said = [*script, Message(role="assistant", content="I am done.")]
    engine = ScriptedEngine(tokenizer=tokenizer, script=said)
    env, attempt = make_env(), Attempt(task=task, episode_id="check")
    settings = RolloutSettings(config=_CONFIG, max_turns=len(said))
    runner = token_runner(env, attempt, engine, settings, tokenizer)
    segments = (await play_episode(env, attempt, runner, _CONFIG)).segments
    num_tokens = sum(len(segment.token_ids()) for segment in segments)
    problem = _broken_prefix(segments, engine.prompts.values()) or _broken_record(segments)
    return num_tokens, problem


def _broken_prefix(segments: Sequence[Trajectory], prompts: Iterable[Sequence[int]]) -> str | None:
    """Each prompt that the engine saw is what was recorded before the turn, token for token."""
    asked = iter(prompts)
    for segment in segments:
        recorded: list[int] = []
        for number, turn in enumerate(segment.turns):
            recorded += turn.observation_ids
            if list(next(asked)) != recorded:
                return f"the prompt of turn {number + 1} is not the one before, what was said, and the new messages"
            recorded += turn.completion.token_ids
    return None


def _broken_record(segments: Sequence[Trajectory]) -> str | None:
    for segment in segments:
        lengths = {len(segment.token_ids()), len(segment.action_mask()), len(segment.behavior_logprobs())}
        if len(lengths) > 1:
            return f"tokens, mask and logprobs differ in length: {sorted(lengths)}"
        if not segment.num_action_tokens:
            return "no token was the model's"
    return None
