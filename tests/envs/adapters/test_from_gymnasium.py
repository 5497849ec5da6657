"""Gymnasium's games as environments: described in words, played by scripts; what has no words is refused by name."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from agentrl.check import check_env
from agentrl.env import Env, load_env_class, play_script
from agentrl.errors import ConfigError, EnvError
from agentrl.types import Message, StopReason
from envs.adapters.from_gymnasium import GymnasiumEnv, from_gymnasium

TAXI_MOVES = {"south": (1, 0), "north": (-1, 0), "east": (0, 1), "west": (0, -1)}


def says(*texts: str) -> list[Message]:
    return [Message(role="assistant", content=text) for text in texts]


def first_task(env_class: type[Env], index: int = 0) -> Any:
    return [task for task, _ in zip(env_class.tasks("test"), range(index + 1), strict=False)][index]


def taxi_route(text: str) -> list[str]:
    """A way to the passenger and on to the destination, read from what the model is shown."""
    from re import search

    lines = text.splitlines()
    lines = lines[next(i for i, line in enumerate(lines) if line.startswith("+")) + 1 :]
    places = {c: (row, i // 2) for row, line in enumerate(lines) for i, c in enumerate(line) if c in "RGYB"}
    row, column, passenger, goal = search(  # type: ignore[union-attr]
        r"row (\d), column (\d)\. Passenger: (\w)\. Destination: (\w)\.", text
    ).groups()

    def path(start: tuple[int, int], end: tuple[int, int]) -> list[str]:
        queue, seen = deque([(start, list[str]())]), {start}
        while queue:
            (r, c), moves = queue.popleft()
            if (r, c) == end:
                return moves
            for name, (dr, dc) in TAXI_MOVES.items():
                wall = dc and lines[r][2 * c + 1 + dc] == "|"
                there = (r + dr, c + dc)
                if not wall and 0 <= there[0] < 5 and 0 <= there[1] < 5 and there not in seen:
                    seen.add(there)
                    queue.append((there, [*moves, name]))
        raise AssertionError("no way")

    start = (int(row), int(column))
    return [*path(start, places[passenger]), "pickup", *path(places[passenger], places[goal]), "dropoff"]


@pytest.mark.parametrize(
    ("target", "kwargs", "saying"),
    [
        ("FrozenLake-v1", {}, "It is slippery: 33% of your moves go where you want"),
        ("FrozenLake-v1", {"success_rate": 0.8}, "It is slippery: 80% of your moves"),
        ("FrozenLake-v1", {"is_slippery": False}, "It is not slippery"),
        ("CliffWalking-v1", {"is_slippery": True}, "It is slippery: 33% of your moves"),
        ("CliffWalking-v1", {}, "It is not slippery"),
    ],
)
def test_the_prompt_says_how_slippery_it_is(target: str, kwargs: dict[str, Any], saying: str) -> None:
    assert saying in first_task(from_gymnasium(target, **kwargs)).prompt


async def test_frozen_lake_is_crossed() -> None:
    lake = from_gymnasium("FrozenLake-v1", is_slippery=False)
    script = says("right", "I go on.\n\nAction: Right.", "DOWN", "down", "down", "right")
    episode = await play_script(lake(), first_task(lake), script)
    assert (episode.reward, episode.stop_reason) == (1.0, StopReason.COMPLETED)
    assert "[S]FFF\nFHFH" in episode.messages[0].content
    assert "left, down, right, up" in episode.messages[0].content
    assert episode.messages[-1].content.endswith("HFF[G]")


async def test_every_step_of_the_cliff_walk_costs() -> None:
    cliff = from_gymnasium("CliffWalking-v1")
    script = says("up", *["right"] * 11, "down")
    episode = await play_script(cliff(), first_task(cliff), script)
    assert (episode.reward, episode.rewards) == (-13.0, {"step": -13.0})
    assert episode.stop_reason is StopReason.COMPLETED


async def test_a_hand_of_blackjack_is_played() -> None:
    blackjack = from_gymnasium("Blackjack-v1")
    episode = await play_script(blackjack(), first_task(blackjack), says("stick"))
    assert episode.reward in (-1.0, 0.0, 1.0, 1.5)
    assert episode.stop_reason is StopReason.COMPLETED
    assert "Your sum is" in episode.messages[0].content


async def test_the_taxi_finds_its_way_by_what_it_is_told() -> None:
    taxi = from_gymnasium("Taxi-v4")
    task = first_task(taxi, 1)
    opening, _ = await (env := taxi()).reset(task=task)
    await env.close()
    route = taxi_route(opening[0].content)
    episode = await play_script(taxi(), task, says(*route))
    assert (episode.reward, episode.stop_reason) == (20.0 - (len(route) - 1), StopReason.COMPLETED)


@pytest.mark.parametrize("target", ["FrozenLake-v1", "CliffWalking-v1", "Blackjack-v1", "Taxi-v4"])
async def test_our_check_passes(target: str) -> None:
    env_class = load_env_class(f"gymnasium:{target}", {"num_test_tasks": 4})
    report = await check_env(env_class, data=None, sandbox=None)
    assert [check for check in report.checks if not check.ok] == []


async def test_a_bad_action_is_an_observation_and_is_counted() -> None:
    lake = from_gymnasium("FrozenLake-v1", is_slippery=False)
    script = says("left and right", "fly", "<tool_call>", "9", "2")
    episode = await play_script(lake(), first_task(lake), script)
    assert episode.info["bad_actions"] == 4
    assert "no action in your last line" in episode.messages[2].content
    assert "S[F]FF" in episode.messages[-1].content


def test_a_task_is_a_seed_and_no_seed_is_in_both_splits() -> None:
    lake = from_gymnasium("FrozenLake-v1", num_test_tasks=5)
    test = [task.metadata["seed"] for task in lake.tasks("test")]
    train = [task.metadata["seed"] for task, _ in zip(lake.tasks("train", seed=3), range(100), strict=False)]
    assert len(test) == 5
    assert not set(test) & set(train)
    assert len({*train}) == 100
    again = [task.metadata["seed"] for task, _ in zip(lake.tasks("train", seed=3), range(100), strict=False)]
    assert train == again


class Custom(gymnasium.Env[Any, Any]):
    """Whatever spaces the test wants; answers with the action."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation, action
        self.played: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.threads = {threading.get_ident()}
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.played.append(action)
        self.threads.add(threading.get_ident())
        if isinstance(action, str) and action == "crash":
            raise RuntimeError("the game is broken")
        return self.observation_space.sample(), 0.25, len(self.played) == 2, False, {}


@pytest.fixture
def custom() -> Any:
    made: list[Custom] = []

    def register(observation: spaces.Space[Any], action: spaces.Space[Any]) -> list[Custom]:
        def entry(**kwargs: Any) -> Custom:
            made.append(Custom(observation, action))
            return made[-1]

        gymnasium.registry.pop("agentrl-tests/Custom-v0", None)
        gymnasium.register("agentrl-tests/Custom-v0", entry_point=entry)
        return made

    yield register
    gymnasium.registry.pop("agentrl-tests/Custom-v0", None)


NESTED = spaces.Dict(
    {"move": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(2))), "word": spaces.Text(5)}
)


async def test_composite_actions_are_json_and_text_is_text(custom: Callable[..., list[Custom]]) -> None:
    made = custom(NESTED, NESTED)
    env_class = from_gymnasium("agentrl-tests/Custom-v0")
    action = '{"move": [3, [0, 1]], "word": "hi"}'
    script = says('{"move": [4, [0, 1]], "word": "hi"}', "[" * 10_000, f"So:\n{action}", action)
    episode = await play_script(env_class(), first_task(env_class), script)
    assert (episode.reward, episode.info["bad_actions"]) == (0.5, 2)
    played = made[-1].played[0]
    assert NESTED.contains(played)
    assert (played["move"][0], played["move"][1].tolist(), played["word"]) == (3, [0, 1], "hi")


async def test_a_game_keeps_to_one_thread_and_its_crash_is_infrastructure(
    custom: Callable[..., list[Custom]],
) -> None:
    made = custom(spaces.Discrete(3), spaces.Text(10))
    env_class = from_gymnasium("agentrl-tests/Custom-v0")
    await play_script(env_class(), first_task(env_class), says("one", "two"))
    assert len(made[-1].threads) == 1
    assert threading.get_ident() not in made[-1].threads
    with pytest.raises(EnvError, match="the game is broken"):
        await play_script(env_class(), first_task(env_class), says("crash"))


BOX = spaces.Box(-1, 1, (2,), np.float32)


def test_numbers_without_words_are_refused_by_name(custom: Callable[..., list[Custom]]) -> None:
    custom(BOX, spaces.Discrete(2))
    with pytest.raises(ConfigError, match=r"observations of Box.*describe="):
        from_gymnasium("agentrl-tests/Custom-v0")
    assert issubclass(from_gymnasium("agentrl-tests/Custom-v0", describe=str), GymnasiumEnv)
    custom(spaces.Discrete(2), BOX)
    with pytest.raises(ConfigError, match=r"actions of Box.*only discrete and text"):
        from_gymnasium("agentrl-tests/Custom-v0")


@pytest.mark.parametrize(
    ("target", "kwargs", "said"),
    [
        ("gymnasium:NoSuchGame-v0", {}, "NoSuchGame"),
        ("gymnasium:FrozenLake-v1", {"no_such_option": 1}, "no_such_option"),
        ("gymnasium:FrozenLake-v1", {"action_names": ["up"]}, "1 names, the environment has 4 actions"),
    ],
)
def test_wrong_targets_and_options_are_config_errors(target: str, kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_env_class(target, kwargs)
