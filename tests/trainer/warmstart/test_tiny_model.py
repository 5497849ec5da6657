import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.config import WarmstartConfig
from agentrl.errors import ConfigError
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import system, user
from envs.modmath import ModMath
from trainer.warmstart.tiny_model import make_model, make_tokenizer, save

PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "python", "description": "Run Python.", "parameters": PARAMETERS}}
CALL = {"function": {"name": "python", "arguments": {"code": 'print("a")\nprint(1)'}}}
DIALOGUE = [
    {"role": "system", "content": "Solve."},
    {"role": "user", "content": "What is 12 + 3?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "15"},
    {"role": "assistant", "content": "It is \\boxed{15}."},
]


def test_tokenizer_survives_saving(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = '2024 été 漢字 🙂\t<tool_call>\n{"name": "python"}\n</tool_call><|im_end|>\n'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    raw = json.loads((tiny_model_dir / "tokenizer.json").read_text())
    assert raw["pre_tokenizer"] == json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"]


def test_each_digit_is_one_token(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    ids = tokenizer.encode("x 4242", add_special_tokens=False)
    assert [tokenizer.decode([i]) for i in ids[-4:]] == ["4", "2", "4", "2"]


def test_markers_are_single_tokens(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    for marker in ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>"):
        assert len(tokenizer.encode(marker, add_special_tokens=False)) == 1
    assert tokenizer.eos_token == "<|im_end|>"


def test_template_renders_a_tool_dialogue(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = tokenizer.apply_chat_template(DIALOGUE, tools=[TOOL], tokenize=False)
    assert text.endswith(
        "<|im_start|>user\nWhat is 12 + 3?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "python", "arguments": {"code": "print(\\"a\\")\\nprint(1)"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n15\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is \\boxed{15}.<|im_end|>\n"
    )
    assert text.startswith(
        "<|im_start|>system\nSolve.\nTools, called by <tool_call>:\npython(code): Run Python.<|im_end|>\n"
    )


def test_template_only_ever_appends(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    full = tokenizer.apply_chat_template(DIALOGUE, tools=[TOOL], tokenize=False)
    for end in (2, 4):
        prompt = tokenizer.apply_chat_template(DIALOGUE[:end], tools=[TOOL], tokenize=False, add_generation_prompt=True)
        assert full.startswith(prompt)


def test_two_tool_results_share_a_turn(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    messages = [*DIALOGUE[:3], {"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
    )


def test_no_system_turn_without_system_and_tools(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = tokenizer.apply_chat_template(DIALOGUE[1:2], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhat is 12 + 3?<|im_end|>\n<|im_start|>assistant\n"


def test_model_is_what_the_config_says(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.head_dim) == (64, 2, 32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype.is_floating_point and model.dtype.itemsize == 4
    assert model.generation_config.eos_token_id == model.config.eos_token_id


def test_same_seed_same_weights() -> None:
    tokenizer = make_tokenizer(["abc"], 300)
    shape = WarmstartConfig(hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=32)
    first, again, other = (make_model(shape, tokenizer, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(bool((first[name] == again[name]).all()) for name in first)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not bool((first[name] == other[name]).all())


def test_default_shape_has_about_half_a_million_parameters() -> None:
    config = WarmstartConfig()
    model = make_model(config, make_tokenizer(["abc"], config.vocab_size), seed=0)
    num_missing_tokens = config.vocab_size - model.config.vocab_size
    assert 0.4e6 <= model.num_parameters() + num_missing_tokens * config.hidden_size <= 0.6e6


def test_a_model_is_never_overwritten(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    with pytest.raises(ConfigError, match="exists already"):
        save(tiny_model_dir, None, tokenizer)


def test_failed_save_leaves_nothing(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["abc"], 300)
    with pytest.raises(AttributeError):
        save(tmp_path / "model", object(), tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_too_small_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size=200"):
        make_tokenizer(["abc"], 200)


def test_the_template_teaches_how_to_call_so_that_no_longer_instructions_are_added(tiny_model_dir: Path) -> None:
    turns = TurnTokenizer.load(str(tiny_model_dir)).with_tool_format("auto")
    text = turns.decode(turns.first_prompt([system("Solve."), user("2?")], ModMath.tool_schemas()))
    assert text == (
        "<|im_start|>system\nSolve.\nTools, called by <tool_call>:\npython(code): Run Python code. Variables persist "
        "between calls.<|im_end|>\n<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n"
    )
