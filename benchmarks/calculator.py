"""A calculator task small enough to train in seconds on one core, and a policy of 0.1 M parameters for it.

The policy reads `?11+49+98>`, calls a calculator `C11+49;`, gets `R60;`, calls it again `C60+98;`, gets `R158;` and
answers `A158$`; reward 1 for the right answer. It starts from noisy demonstrations. Independent of how it is trained
or of how episodes are sampled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import gettempdir

import torch
from torch import Tensor, nn

CHARACTERS = "_0123456789+?>CRA;$."  # the first is padding
INDEX = {character: i for i, character in enumerate(CHARACTERS)}
WIDTH, NUM_LAYERS, NUM_HEADS = 64, 2, 4
NUM_OPERANDS = 3
PROMPT_TOKENS = 1 + 3 * NUM_OPERANDS
MAX_TOKENS, MAX_ACTIONS = 52, 30
NO_ANSWER = -1
SKILL = 0.4
WARM_STEPS = 500


class Policy(nn.Module):
    """A causal transformer over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(len(CHARACTERS), WIDTH)
        self.position = nn.Embedding(MAX_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        hidden_BTD = self.token(ids_BT) + self.position(torch.arange(ids_BT.shape[1]))
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        logits_BTV: Tensor = self.head(self.norm(hidden_BTD))
        return logits_BTV


class Block(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Same shape."""
        batch, length, _ = hidden_BTD.shape
        qkv = self.qkv(self.norm1(hidden_BTD)).view(batch, length, 3, NUM_HEADS, -1).permute(2, 0, 3, 1, 4)
        mask = torch.full((length, length), -torch.inf).triu(1)
        attention = (qkv[0] @ qkv[1].transpose(-1, -2) / qkv.shape[-1] ** 0.5 + mask).softmax(-1)
        mixed = (attention @ qkv[2]).transpose(1, 2).reshape(batch, length, -1)
        hidden_BTD = hidden_BTD + self.out(mixed)
        out: Tensor = hidden_BTD + self.down(torch.nn.functional.gelu(self.up(self.norm2(hidden_BTD))))
        return out


def tokens(text: str) -> list[int]:
    """Token ids of a text."""
    return [INDEX[character] for character in text]


def text(ids: Sequence[int]) -> str:
    """The text of token ids."""
    return "".join(CHARACTERS[i] for i in ids)


def tasks(number: int, generator: torch.Generator) -> list[list[int]]:
    """`number` tasks of NUM_OPERANDS numbers of two digits each."""
    drawn: list[list[int]] = torch.randint(10, 100, (number, NUM_OPERANDS), generator=generator).tolist()
    return drawn


def prompt(operands: Sequence[int]) -> str:
    """The policy's prompt: PROMPT_TOKENS characters."""
    return "?" + "+".join(map(str, operands)) + ">"


def reply(call: str) -> str:
    """The calculator's reply to a turn that ends with `;`."""
    found = re.fullmatch(r"C(\d+)\+(\d+);", call)
    return f"R{(int(found[1]) + int(found[2])) % 1000};" if found else "R.;"


def reward(turn: str, operands: Sequence[int]) -> float:
    """1 for the right answer in the turn that ended the episode, else 0."""
    return float(turn == f"A{sum(operands)}$")


def error(turn: str, operands: Sequence[int]) -> int:
    """|answer - sum| of the turn that ended the episode; NO_ANSWER where it gives no number."""
    found = re.fullmatch(r"A(\d+)\$", turn)
    return abs(int(found[1]) - sum(operands)) if found else NO_ANSWER


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of token ids, padded on the right. [B, T]"""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


@lru_cache(maxsize=32)
def warm_start(seed: int, num_steps: int = WARM_STEPS) -> dict[str, Tensor]:
    """Weights that imitate a demonstrator who is right with probability SKILL. Cached in the temporary folder."""
    path = Path(gettempdir()) / f"agentrl-calculator-{NUM_OPERANDS}-{num_steps}-{seed}.pt"
    if path.exists():
        found: dict[str, Tensor] = torch.load(path)
        return found
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for _ in range(num_steps):
        ids_BT = padded([tokens(_demonstration(generator)) for _ in range(32)])
        logits_BTV = policy(ids_BT[:, :-1])
        start = PROMPT_TOKENS - 1
        loss = nn.functional.cross_entropy(
            logits_BTV[:, start:].flatten(0, 1), ids_BT[:, start + 1 :].flatten(), ignore_index=0
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    weights = {name: value.clone() for name, value in policy.state_dict().items()}
    torch.save(weights, path)
    return weights


def _demonstration(generator: torch.Generator) -> str:
    """One episode; with probability 1 - SKILL one operand is copied wrong."""
    operands = tasks(1, generator)[0]
    copied = list(operands)
    if torch.rand((), generator=generator) >= SKILL:
        wrong = int(torch.randint(NUM_OPERANDS, (), generator=generator))
        copied[wrong] = tasks(1, generator)[0][0]
    total, episode = copied[0], prompt(operands)
    for operand in copied[1:]:
        call = f"C{total}+{operand};"
        episode += call + reply(call)
        total += operand
    return episode + f"A{total}$"
