"""A calculator task small enough to train in a minute on one core, and a policy of 0.1 M parameters for it.

The policy reads `?17+58>`, calls a calculator `C17+58;`, gets `R75;` and answers `A75$`; reward 1 for the right answer.
It starts from noisy demonstrations. Knows nothing of how it is trained.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

CHARACTERS = "_0123456789+?>CRA;$."  # the first is padding
INDEX = {character: i for i, character in enumerate(CHARACTERS)}
WIDTH, NUM_LAYERS, NUM_HEADS = 64, 2, 4
MAX_TOKENS, MAX_ACTIONS = 40, 20
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


@dataclass(kw_only=True)
class Play:
    """One episode under way."""

    target: int
    ids: list[int]
    acted: list[bool]
    logprobs: list[float]
    turn: str = ""
    is_over: bool = False
    reward: float = 0.0

    def observe(self, text: str) -> None:
        """Append what the model did not write."""
        self.ids += [INDEX[character] for character in text]
        self.acted += [False] * len(text)
        self.logprobs += [0.0] * len(text)

    def act(self, token: int, logprob: float) -> None:
        """Append a sampled token and let the calculator answer."""
        self.ids.append(token)
        self.acted.append(True)
        self.logprobs.append(logprob)
        self.turn += CHARACTERS[token]
        if self.turn.endswith("$"):
            self.is_over, self.reward = True, float(self.turn == f"A{self.target}$")
        elif self.turn.endswith(";"):
            call = re.fullmatch(r"C(\d+)\+(\d+);", self.turn)
            self.observe(f"R{(int(call[1]) + int(call[2])) % 1000};" if call else "R.;")
            self.turn = ""
        self.is_over |= sum(self.acted) >= MAX_ACTIONS or len(self.ids) > MAX_TOKENS - 6


def task(generator: torch.Generator) -> tuple[int, int]:
    """Two numbers of two digits."""
    first, second = torch.randint(10, 100, (2,), generator=generator).tolist()
    return first, second


def rollout(policy: Policy, tasks: Sequence[tuple[int, int]], generator: torch.Generator) -> list[Play]:
    """One episode per task, in step."""
    plays = [Play(target=a + b, ids=[], acted=[], logprobs=[]) for a, b in tasks]
    for play, (a, b) in zip(plays, tasks, strict=True):
        play.observe(f"?{a}+{b}>")
    while open_plays := [play for play in plays if not play.is_over]:
        with torch.no_grad():
            logits_BTV = policy(padded([play.ids for play in open_plays]))
        last_B = torch.tensor([len(play.ids) - 1 for play in open_plays])
        log_p_BV = logits_BTV[torch.arange(len(open_plays)), last_B].log_softmax(-1)
        token_B = torch.multinomial(log_p_BV.exp(), 1, generator=generator)[:, 0]
        for play, token, log_p_V in zip(open_plays, token_B.tolist(), log_p_BV, strict=True):
            play.act(token, float(log_p_V[token]))
    return plays


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of token ids, filled up on the right. [B, T]"""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


@lru_cache(maxsize=1)
def warm_start(seed: int) -> dict[str, Tensor]:
    """Weights that imitate a demonstrator who copies and answers right with probability SKILL."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for _ in range(WARM_STEPS):
        ids_BT = padded([_demonstration(generator) for _ in range(32)])
        logits_BTV = policy(ids_BT[:, :-1])
        loss = nn.functional.cross_entropy(logits_BTV[:, 6:].flatten(0, 1), ids_BT[:, 7:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.clone() for name, value in policy.state_dict().items()}


def _demonstration(generator: torch.Generator) -> list[int]:
    (a, b), is_right = task(generator), torch.rand((), generator=generator) < SKILL
    copied = b if is_right else task(generator)[1]
    text = f"?{a}+{b}>C{a}+{copied};R{a + copied};A{a + copied}$"
    return [INDEX[character] for character in text]
