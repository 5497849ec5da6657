"""Words for Gymnasium's toy-text games: rules, names of actions, descriptions of observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Describe = Callable[[Any, Any], str]
"""(the bare environment, the observation) -> text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The description of a game."""

    rules: str
    actions: tuple[str, ...]
    describe: Describe | None = None
    of_variant: Callable[[Any], str] | None = None
    """(the bare environment) -> rules that depend on how it was made."""

    def rules_of(self, env: Any) -> str:
        """The rules of this environment."""
        return " ".join(filter(None, (self.rules, self.of_variant(env) if self.of_variant else "")))


def _taxi(env: Any, observation: Any) -> str:
    row, column, passenger, destination = env.decode(int(observation))
    places = ("R", "G", "Y", "B", "in the taxi")
    return (
        f"The taxi is at row {row}, column {column}. Passenger: {places[passenger]}. "
        f"Destination: {places[destination]}.\n{_picture(env)}"
    )


def _picture(env: Any) -> str:
    return "\n".join(b"".join(line).decode() for line in env.desc)


def _blackjack(env: Any, observation: Any) -> str:
    mine, dealers, has_ace = (int(part) for part in observation)
    ace = "a usable ace" if has_ace else "no usable ace"
    return f"Your sum is {mine} with {ace}. The dealer shows {dealers}."


def _ice(env: Any) -> str:
    """How slippery the ground is: by the chance of the intended move in the game's own table of transitions."""
    moves = max((move for moves in env.P.values() for move in moves.values()), key=len)
    if len(moves) == 1:
        return "It is not slippery: you move where you want."
    _, (chance, *_), _ = moves  # to one side, as intended, to the other side
    return (
        f"It is slippery: {chance:.0%} of your moves go where you want, the others to one of the two sides at a "
        "right angle to that."
    )


GAMES = {
    "FrozenLake": Words(
        rules="Walk from S to G on a frozen lake. F is ice, H is a hole that ends the game; the square in [brackets] "
        "is yours. Reaching G is worth 1.",
        actions=("left", "down", "right", "up"),
        of_variant=_ice,
    ),
    "CliffWalking": Words(
        rules="Walk on a grid from the lower left corner to T in the lower right one; x is yours. Each step costs 1. "
        "Stepping on the cliff C costs 100 and takes you back to the start.",
        actions=("up", "right", "down", "left"),
        of_variant=_ice,
    ),
    "Taxi": Words(
        rules="Drive the taxi to the passenger, pick up, drive to the destination, drop off. Rows and columns count "
        "from 0 at the upper left, | and - are walls, : can be crossed. Each step costs 1, a wrong pickup or dropoff "
        "10, and arriving pays 20.",
        actions=("south", "north", "east", "west", "pickup", "dropoff"),
        describe=_taxi,
    ),
    "Blackjack": Words(
        rules="Come as close to 21 as you can without going over, and closer than the dealer, who draws up to 17. "
        "Winning pays 1, losing costs 1.",
        actions=("stick", "hit"),
        describe=_blackjack,
    ),
}
"""Game id without its version -> words."""
