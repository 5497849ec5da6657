"""Plays scripted episodes token by token, as a rollout does, and checks that the record only grows.

Needs no model: a ScriptedEngine speaks, with a tokenizer of bytes unless another one is given.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from agentrl.config import RolloutConfig
from agentrl.env.base import Env
from agentrl.rollouts.episode import play_episode
from agentrl.rollouts.settings import Attempt, RolloutSettings
from agentrl.rollouts.token_speaker import token_runner
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Message, Task, Trajectory

_CONFIG = RolloutConfig(max_context=2**20, max_turn_tokens=2**18, tool_output_tokens=2**17)
_CHATML = """
{%- if tools %}{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') }}
{{- '\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' }}
"""


def load_tokenizer(path: str | None) -> TurnTokenizer:
    """The tokenizer of a model, or None: one of bytes with ChatML turns. Raises ConfigError."""
    if path is not None:
        return TurnTokenizer.load(path)
    with tempfile.TemporaryDirectory(prefix="agentrl-bytes-") as folder:
        return TurnTokenizer.load(str(write_byte_tokenizer(Path(folder))))


async def find_token_problem(
    make_env: Callable[[], Env], task: Task, script: Sequence[Message], tokenizer: TurnTokenizer
) -> tuple[int, str | None]:
    """(tokens played, the first problem found or None). Raises InfraError, ConfigError as a rollout does."""
    said = [*script, Message(role="assistant", content="I am done.")]
    engine = ScriptedEngine(tokenizer=tokenizer, script=said)
    env, attempt = make_env(), Attempt(task=task, episode_id="check")
    settings = RolloutSettings(config=_CONFIG, max_turns=len(said))
    runner = token_runner(env, attempt, engine, settings, tokenizer)
    segments = (await play_episode(env, attempt, runner, _CONFIG)).record.segments
    num_tokens = sum(len(segment.token_ids()) for segment in segments)
    problem = _broken_prefix(segments, engine.prompts.values()) or _broken_record(segments)
    return num_tokens, problem


def _broken_prefix(segments: Sequence[Trajectory], prompts: Iterable[Sequence[int]]) -> str | None:
    """A problem unless each prompt that the engine received equals the record before its turn, token for token."""
    asked = iter(prompts)
    for segment in segments:
        recorded: list[int] = []
        for number, turn in enumerate(segment.turns):
            recorded += turn.observation_ids
            if list(next(asked)) != recorded:
                return f"the prompt of turn {number + 1} is not the prompt before, its completion and the new messages"
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


def write_byte_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of bytes with ChatML turns in Hugging Face layout; returns the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    markers = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": specials[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(_CHATML)
    return folder
