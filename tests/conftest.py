"""Fixtures shared by all tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face layout: a random 2-layer Qwen3 (about 0.1 M parameters) and its tokenizer."""
    from agentrl.config import WarmstartConfig
    from trainer.tiny_model import make_model, make_tokenizer, save

    texts = [
        'You may call <tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>',
        "<tool_response>\n42\n</tool_response> The answer is \\boxed{42}.",
        "def f(x):\n    return x % 7\n",
    ] * 4
    shape = WarmstartConfig(
        vocab_size=384, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=128
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = make_tokenizer(texts, shape.vocab_size)
    save(folder, make_model(shape, tokenizer, seed=0), tokenizer)
    return folder
