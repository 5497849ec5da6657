"""Small tokenizers with the token layout and the chat template behaviour of widely trained model families."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_WORDS = ["user assistant system tool model print answer name arguments python code What is the result of this"] * 5


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: its tokens, whether it is byte-level, and its template."""

    name: str
    special: tuple[str, ...]
    markers: tuple[str, ...] = ()  # added tokens that are not special: the model's own words
    spm: str = ""  # "first" (space before a text) or "never": SentencePiece-like with byte fallback
    bos: str | None = None
    eos: str
    template: str
    tool_answer: str  # what follows a closed turn when the tool said "R"; the next turn is opened


_CHATML_TOOLS = """
{%- if tools %}{{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
  {{- '# Tools\\n\\nSignatures within <tools></tools> XML tags:\\n<tools>' }}
  {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
  {{- '\\n</tools>\\n\\nWithin <tool_call></tool_call> XML tags.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
DEFAULT
{%- endif %}"""
_CHATML_CALLS = """
  {%- for call in message.tool_calls or [] %}
    {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
    {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
  {%- endfor %}"""
_CHATML_ANSWERS = """
  {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
  {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
  {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"""
_CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML_TOOL_ANSWER = "\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n<|im_start|>assistant\n"

QWEN25 = Family(
    name="qwen2.5",
    special=_CHATML_SPECIAL,
    markers=("<tool_call>", "</tool_call>"),
    eos="<|im_end|>",
    tool_answer=_CHATML_TOOL_ANSWER,
    template=_CHATML_TOOLS.replace(
        "DEFAULT", "{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    )
    + """
{%- for message in messages %}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
  {%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}
    {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}"""
    + _CHATML_CALLS
    + "{{- '<|im_end|>\\n' }}{%- elif message.role == 'tool' %}"
    + _CHATML_ANSWERS
    + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
)

# Thoughts are kept only behind the last question of a user; with thinking switched off, the prompt holds an empty one.
QWEN3 = Family(
    name="qwen3",
    special=_CHATML_SPECIAL,
    markers=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    eos="<|im_end|>",
    tool_answer=_CHATML_TOOL_ANSWER,
    template=_CHATML_TOOLS.replace("DEFAULT", "")
    + """
{%- set ns = namespace(asking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
  {%- set index = messages|length - 1 - loop.index0 %}
  {%- if ns.asking and message.role == 'user' and not message.content.startswith('<tool_response>') %}
    {%- set ns.asking = false %}{%- set ns.last = index %}
  {%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
  {%- elif message.role == 'assistant' %}
    {%- set content = message.content %}{%- set thought = '' %}
    {%- if '</think>' in content %}
      {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last and (loop.last or thought) %}
      {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
    {%- else %}{{- content }}{%- endif %}"""
    + _CHATML_CALLS
    + "{{- '<|im_end|>\\n' }}{%- elif message.role == 'tool' %}"
    + _CHATML_ANSWERS
    + """{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
)

# One header per turn; contents are trimmed; tool output is a JSON value under the role ipython; one call per turn.
LLAMA3 = Family(
    name="llama-3",
    special=tuple(
        f"<|{what}|>"
        for what in (
            "begin_of_text",
            "end_of_text",
            "start_header_id",
            "end_header_id",
            "eot_id",
            "eom_id",
            "python_tag",
        )
    ),
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    tool_answer='<|start_header_id|>ipython<|end_header_id|>\n\n"R"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    template="""{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set told = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set told = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none and tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\n\\n' + told + '<|eot_id|>' }}
{%- if tools is not none and tools %}
  {{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer with a JSON function call.\\n\\n' }}
  {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
  {{- messages[0].content | trim + '<|eot_id|>' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
  {%- if message.role in ('tool', 'ipython') %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
    {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
    {%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}
  {%- elif message.tool_calls %}
    {%- if message.tool_calls|length != 1 %}{{- raise_exception('one tool call at once') }}{%- endif %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + message.tool_calls[0].function.name }}
    {{- '", "parameters": ' }}{{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
)

# Turns alternate; the system text moves to the last question; a tool message without the call before it is refused.
MISTRAL = Family(
    name="mistral",
    special=(
        *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
        *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    spm="first",
    bos="<s>",
    eos="</s>",
    tool_answer='[TOOL_RESULTS] {"content": R, "call_id": "call00000"}[/TOOL_RESULTS]',
    template="""
{%- if messages[0].role == 'system' %}{%- set told = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set asked = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0, called=false) %}
{%- for message in loop_messages %}
  {%- if message.role == 'tool' and not ns.called %}{{- raise_exception('a tool answers a call') }}{%- endif %}
  {%- set ns.called = message.role == 'tool' or (message.tool_calls is defined and message.tool_calls is not none) %}
  {%- if not ns.called %}
    {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
      {{- raise_exception('user and assistant must alternate') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
  {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
  {%- if message.role == 'user' %}
    {%- if tools is not none and message == asked[-1] %}
      {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {{- '[INST] ' }}{%- if loop.last and told is defined %}{{- told + '\\n\\n' }}{%- endif %}
    {{- message.content + '[/INST]' }}
  {%- elif message.tool_calls is defined and message.tool_calls is not none %}
    {{- '[TOOL_CALLS] [' }}
    {%- for call in message.tool_calls %}
      {%- if call.id is not defined or call.id|length != 9 %}{{- raise_exception('ids have length 9') }}{%- endif %}
      {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
      {{- ', ' if not loop.last else ']' + eos_token }}
    {%- endfor %}
  {%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
  {%- elif message.role == 'tool' %}
    {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
    {{- '[/TOOL_RESULTS]' }}
  {%- else %}{{- raise_exception('no such role') }}{%- endif %}
{%- endfor %}""",
)

# Neither a system role nor a tool role; turns alternate; contents are trimmed.
GEMMA = Family(
    name="gemma",
    special=("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    spm="never",
    bos="<bos>",
    eos="<eos>",
    tool_answer="\n<start_of_turn>user\n<tool_response>\nR\n</tool_response><end_of_turn>\n<start_of_turn>model\n",
    template="""{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {%- endif %}
  {%- set role = 'model' if message.role == 'assistant' else message.role %}
  {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}""",
)

# The system text stands before the first turn; arguments of calls are texts; the first of several answers opens a list
# that only a turn with calls resets, and no new turn is opened behind it. The prompt opens a thought.
DEEPSEEK = Family(
    name="deepseek",
    special=tuple(
        f"<｜{what}｜>"
        for what in (
            *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep"),
            *(f"tool▁{part}▁{end}" for part in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
        )
    ),
    markers=("<think>", "</think>"),
    bos="<｜begin▁of▁sentence｜>",
    eos="<｜end▁of▁sentence｜>",
    tool_answer="<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>R<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    template="""
{%- set ns = namespace(is_first_call=true, is_tool=false, is_first_output=true, told='') %}
{%- for message in messages %}{%- if message.role == 'system' %}{%- set ns.told = message.content %}{%- endif %}
{%- endfor %}{{- bos_token }}{{- ns.told }}
{%- for message in messages %}
  {%- if message.role == 'user' %}{%- set ns.is_tool = false %}{{- '<｜User｜>' + message.content }}{%- endif %}
  {%- if message.role == 'assistant' and message.tool_calls %}
    {%- set ns.is_tool = false %}{%- set ns.is_first_output = true %}
    {{- '<｜Assistant｜>' + (message.content or '') + '<｜tool▁calls▁begin｜>' }}
    {%- for call in message.tool_calls %}
      {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
      {{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{{- '' if loop.last else '\\n' }}
    {%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
  {%- elif message.role == 'assistant' %}
    {%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- else %}{{- '<｜Assistant｜>' }}{%- endif %}
    {%- set ns.is_tool = false %}{{- message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
  {%- endif %}
  {%- if message.role == 'tool' %}
    {%- set ns.is_tool = true %}
    {%- if ns.is_first_output %}{{- '<｜tool▁outputs▁begin｜>' }}{%- set ns.is_first_output = false %}
    {%- else %}{{- '\\n' }}{%- endif %}
    {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
  {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}""",
)

FAMILIES = {family.name: family for family in (QWEN25, QWEN3, LLAMA3, MISTRAL, GEMMA, DEEPSEEK)}


def write_family(family: Family, folder: Path) -> Path:
    """A tokenizer of this layout in Hugging Face files."""
    tokenizer = _sentencepiece(family) if family.spm else _byte_level(family)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in family.markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos, "bos_token": family.bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(family.template)
    return folder


def _byte_level(family: Family) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _WORDS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=list(family.special))
    )
    return tokenizer


def _sentencepiece(family: Family) -> Tokenizer:
    """BPE over characters with a visible space, and a token for every byte that has none."""
    characters = sorted(set("".join(_WORDS)) - {" "}) + list("▁\n{}[]():\"'.,<>/|_-+=0123456789")
    pieces = ["▁u", "▁us", "▁a", "an", "ans", "re", "▁re", "▁▁", "▁▁▁▁"]
    merges = [("▁", "u"), ("▁u", "s"), ("▁", "a"), ("a", "n"), ("an", "s"), ("r", "e"), ("▁", "re"), ("▁", "▁")]
    names = [*family.special, *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys([*characters, *pieces])]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [*merges, ("▁▁", "▁▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if family.spm == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    return tokenizer
