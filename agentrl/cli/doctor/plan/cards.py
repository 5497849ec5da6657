"""GPUs to plan for: those of this machine, or those that `--gpus 8x80` names. Public data sheets, no measurement."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.engine.gpus import VisibleGpu, VisibleGpus
from agentrl.errors import ConfigError

MIB = 2**20
MAX_GPUS = 64
_ASKED = re.compile(r"(\d+)x(\w[\w-]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A kind of GPU. Example: `card_named("H100").total_bytes`."""

    name: str
    size: int  # GB, as it is sold
    total_bytes: int  # as nvidia-smi counts it
    flop_per_s: float | None  # dense bfloat16 products, of the data sheet; None where the card is not known
    bytes_per_s: float | None


CARDS = (
    Card(name="H100", size=80, total_bytes=81559 * MIB, flop_per_s=989e12, bytes_per_s=3.35e12),
    Card(name="A100", size=80, total_bytes=81920 * MIB, flop_per_s=312e12, bytes_per_s=2.04e12),
    Card(name="H200", size=141, total_bytes=143771 * MIB, flop_per_s=989e12, bytes_per_s=4.8e12),
    Card(name="B200", size=180, total_bytes=183359 * MIB, flop_per_s=2250e12, bytes_per_s=8e12),
    Card(name="A100-40", size=40, total_bytes=40960 * MIB, flop_per_s=312e12, bytes_per_s=1.56e12),
    Card(name="L40S", size=48, total_bytes=46068 * MIB, flop_per_s=362e12, bytes_per_s=0.864e12),
    Card(name="A10G", size=24, total_bytes=23028 * MIB, flop_per_s=70e12, bytes_per_s=0.6e12),
    Card(name="L4", size=24, total_bytes=23034 * MIB, flop_per_s=121e12, bytes_per_s=0.3e12),
    Card(name="4090", size=24, total_bytes=24564 * MIB, flop_per_s=165e12, bytes_per_s=1.01e12),
    Card(name="5090", size=32, total_bytes=32607 * MIB, flop_per_s=210e12, bytes_per_s=1.79e12),
)
"""The first of each size stands for that size."""


def asked_cards(text: str) -> list[Card]:
    """The GPUs of `--gpus`: `8x80` (GB each) or `8xH100`. Raises ConfigError for anything else.

    >>> [card.name for card in asked_cards("2x80")]
    ['H100', 'H100']
    """
    match = _ASKED.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--gpus {text}: write how many and of what size, `8x80` (GB), or which card, `8xH100`")
    count = int(match[1])
    if not 1 <= count <= MAX_GPUS:
        raise ConfigError(f"--gpus {text}: a machine has 1 to {MAX_GPUS} GPUs")
    return [_card(match[2].upper().removesuffix("GB"), text)] * count


def found_card(name: str, total_bytes: int) -> Card:
    """The card that nvidia-smi names, with the memory that it has.

    >>> found_card("NVIDIA H100 80GB HBM3", 81559 * MIB).name
    'H100'
    """
    for card in CARDS:
        is_named = re.search(rf"\b{card.name.partition('-')[0]}\b", name, re.IGNORECASE)
        if is_named and abs(card.total_bytes - total_bytes) < 0.1 * total_bytes:
            return Card(
                name=card.name,
                size=card.size,
                total_bytes=total_bytes,
                flop_per_s=card.flop_per_s,
                bytes_per_s=card.bytes_per_s,
            )
    return _unknown(round(total_bytes / 1e9), name=name, total_bytes=total_bytes)


def pretended(cards: Sequence[Card]) -> VisibleGpus:
    """The cards as the GPUs of a machine, for `placement.place`."""
    return VisibleGpus(
        gpus=tuple(VisibleGpu(entry=str(at), total_bytes=card.total_bytes) for at, card in enumerate(cards))
    )


def _card(kind: str, asked: str) -> Card:
    if kind.isdigit() and not any(card.name == kind for card in CARDS):
        size = int(kind)
        if size < 4:
            raise ConfigError(f"--gpus {asked}: {size} GB is no size of a GPU that could train; e.g. `1x24`")
        return next((card for card in CARDS if card.size == size), None) or _unknown(size)
    for card in CARDS:
        if kind in (card.name.upper(), f"{card.name.upper()}-{card.size}"):
            return card
    known = ", ".join(card.name for card in CARDS)
    raise ConfigError(f"--gpus {asked}: {kind} is not a known card ({known}); give its memory instead, `8x80` (GB)")


def _unknown(size: int, *, name: str = "", total_bytes: int | None = None) -> Card:
    return Card(
        name=name or f"{size} GB",
        size=size,
        total_bytes=total_bytes or size * 10**9,
        flop_per_s=None,
        bytes_per_s=None,
    )
