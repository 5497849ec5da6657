"""A tokenizer of bytes with ChatML turns, made on the spot: for checks that need tokens, and have no model.

Knows nothing of environments.
"""

from __future__ import annotations

import json
from pathlib import Path

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


def write_byte_tokenizer(folder: Path) -> Path:
    """Write it in Hugging Face layout; returns the folder."""
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
