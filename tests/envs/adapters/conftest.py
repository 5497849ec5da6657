"""The small ChatML tokenizer of tests/agentrl."""

from tests.agentrl.conftest import tokenizer, tokenizer_dir

__all__ = ["tokenizer", "tokenizer_dir"]
