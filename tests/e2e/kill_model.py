"""Makes, in a few seconds, a small model whose turns vary in length, with about ten tokens on average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MEAN_TOKENS = 10
LENGTH_T = 48
NUM_STEPS = 60
BATCH_B = 16


def make_model_folder(folder: Path) -> Path:
    """Write the model to `folder` in Hugging Face layout, bit-identical every time."""
    import torch

    from agentrl.config import WarmstartConfig
    from trainer.warmstart.tiny_model import TURN_END, make_model, make_tokenizer, save

    shape = WarmstartConfig(
        vocab_size=384, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=128
    )
    tokenizer = make_tokenizer(["Write. 1", "12. More."] * 8, shape.vocab_size)
    model = make_model(shape, tokenizer, seed=0)
    _teach_ends(model, tokenizer.convert_tokens_to_ids(TURN_END), torch.Generator().manual_seed(0))
    save(folder, model, tokenizer)
    return folder


def _teach_ends(model: Any, end_id: int, generator: Any) -> None:
    """Train the model to emit any byte, and the end of turn with probability 1 / MEAN_TOKENS."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(NUM_STEPS):
        ids_BT = torch.randint(40, 200, (BATCH_B, LENGTH_T), generator=generator)
        ends_BT = torch.rand(BATCH_B, LENGTH_T, generator=generator) < 1 / MEAN_TOKENS
        ids_BT = ids_BT.masked_fill(ends_BT, end_id)
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
