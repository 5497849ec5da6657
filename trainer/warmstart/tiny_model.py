"""Makes a small random Qwen3 policy and its tokenizer, in Hugging Face layout.

Defines the shape of the model, the vocabulary and the chat template. Independent of environments and training.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.config import WarmstartConfig
from agentrl.errors import ConfigError
from trainer.whole_folder import whole_folder

HEAD_DIM = 32  # the smallest head that vLLM's CPU attention supports
MAX_POSITIONS = 4096
INITIAL_STD = 0.05  # Qwen3's 0.02 suits wide layers; at this width it delays learning to copy numbers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Single tokens that are not special: like Qwen3's own, they are kept when decoding with skip_special_tokens.
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MARKERS = (*SPECIAL_TOKENS, *TOOL_TOKENS)
MIN_VOCAB_SIZE = 256 + len(MARKERS)  # every byte and every marker, no merges

# Qwen3's ChatML without thinking. A tool is one line instead of a schema: prompt tokens cost time in every episode.
CHAT_TEMPLATE = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
{{- '<|im_start|>system\n' + system -}}
{%- if tools -%}
{{- ('\n' if system else '') + 'Tools, called by <tool_call>:' -}}
{%- for tool in tools -%}
{%- set function = tool.function or tool -%}
{{- '\n' + function.name + '(' + function.parameters.properties | join(', ') + '): ' + function.description -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' -}}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' -}}
{%- elif message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- '\n' if message.content or not loop.first else '' -}}
{{- '<tool_call>\n{"name": ' -}}{{- function.name | tojson -}}{{- ', "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' -}}
"""


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Byte-level BPE learned from `texts`: a `PreTrainedTokenizerFast` of at most `vocab_size` tokens.

    Every digit is its own token, so a number is copied digit by digit. Elsewhere merges may cross word boundaries, so
    text that occurs in every episode (tool schema, call syntax, idioms of code) becomes a few tokens.
    Raises ConfigError if `vocab_size` is too small for the 256 bytes and the markers.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"vocab_size={vocab_size} is too small: 256 bytes and {len(MARKERS)} markers come first")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    # Markers are removed from the training text, so that no merge produces a marker.
    between_markers = re.compile("|".join(map(re.escape, MARKERS)))
    bpe.train_from_iterator((part for text in texts for part in between_markers.split(text) if part), trainer)
    bpe.add_special_tokens(list(SPECIAL_TOKENS))
    bpe.add_tokens(list(TOOL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=TURN_END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(config: WarmstartConfig, tokenizer: Any, *, seed: int) -> Any:
    """A randomly initialized float32 `Qwen3ForCausalLM` with tied embeddings. Seeds torch's global generator."""
    import torch
    from transformers import Qwen3ForCausalLM

    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(model_settings(config, vocab_size=len(tokenizer), **ids))


def model_settings(config: WarmstartConfig, **found: int) -> Any:
    """transformers' config of that model; `found` are numbers that the tokenizer decides, such as its vocabulary."""
    from transformers import Qwen3Config

    settings = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": HEAD_DIM,
        "initializer_range": INITIAL_STD,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "dtype": "float32",
    }
    return Qwen3Config(**{**settings, **found})


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write model and tokenizer into `folder`, which appears whole or not at all.

    Raises ConfigError if `folder` exists: a model is never overwritten.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already; remove it or choose another model.path")
    with whole_folder(folder) as temporary:
        model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
        with _no_progress_bar():
            model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers shows one even for a single small file, on top of the caller's own output."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
