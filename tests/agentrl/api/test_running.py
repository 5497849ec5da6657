"""What the functions refuse before anything is started, and what observers are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.errors import ConfigError
from agentrl.report.observer import Observer, Observers
from tests.agentrl.training.whole_run import make_config

CONFIG: dict[str, Any] = {"name": "x", "env": {"target": "envs.modmath:ModMath"}, "model": {"path": "unused"}}
URL = {"model": "http://127.0.0.1:9/v1", "served_model": "m"}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: agentrl.train(), "give a config"),
        (lambda: agentrl.train("nowhere.yaml"), "cannot read config nowhere.yaml"),
        (lambda: agentrl.train([CONFIG]), "a path, a dict or a Config, found list"),
        (lambda: agentrl.train(CONFIG, "seed=3"), r"give a list of them, \['seed=3'\], or a dict"),
        (lambda: agentrl.train(CONFIG, [3]), r"give \['train.steps=20'\] or"),
        (lambda: agentrl.train(CONFIG, {3: 4}), "the key 3 is not a text"),
        (lambda: agentrl.train(CONFIG, {"learner.learning_rate": 1e-4}), "lr"),
        (lambda: agentrl.train(CONFIG, {"train": {"steps": "many"}}), "train.steps"),
        (lambda: agentrl.train(CONFIG, resume="runs/x"), "only what changes, as overrides"),
        (lambda: agentrl.train(resume="nowhere"), "nowhere"),
        (lambda: agentrl.evaluate({**CONFIG, "env": {"target": "nowhere:Env"}}, **URL), "no module 'nowhere'"),
        (lambda: agentrl.evaluate(CONFIG, served_model="m"), "give its URL"),
        (lambda: agentrl.evaluate(CONFIG, model=Path("nowhere")), "model.path: 'nowhere' is neither a folder"),
        (lambda: agentrl.evaluate(CONFIG, **URL, limit=0), "limit=0: give the number of tasks"),
        (lambda: agentrl.rollout(CONFIG, **URL, task="none"), "no test task with id 'none'"),
        (lambda: agentrl.rollout(CONFIG, **URL, save=__file__), "nothing is overwritten"),
        (lambda: agentrl.check_env("nowhere.py:Env"), "no file nowhere.py"),
        (lambda: agentrl.check_env(agentrl.Task), "neither an Env class nor a text"),
        (lambda: agentrl.check_env("nowhere.py:Env", kwargs={"f": print}), "cannot be passed to the process"),
        (lambda: agentrl.check_env("nowhere.py:Env", limit=-1), "limit=-1: give the number of rows"),
        (lambda: agentrl.read_run("nowhere"), "nowhere"),
    ],
)
def test_careless_calls_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        call()
    assert list(tmp_path.iterdir()) == []


class Noting(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def phase_started(self, name: str) -> None:
        self.told.append(("started", name))

    def phase_progress(self, name: str, done: int, total: int) -> None:
        self.told.append(("progress", name, done, total))

    def phase_ended(self, name: str, seconds: float, outcome: str) -> None:
        assert seconds >= 0
        self.told.append(("ended", name, outcome))


@pytest.mark.parametrize(
    ("error", "outcome"), [(None, "done"), (OSError(), "failed"), (asyncio.CancelledError(), "stopped")]
)
def test_every_observer_is_told_how_a_phase_went(error: BaseException | None, outcome: str) -> None:
    first, second = Noting(), Noting()

    def phase() -> None:
        with Observers(first, None, second) as both, both.phase("playing") as advance:
            advance(1, 2)
            if error is not None:
                raise error

    if error is None:
        phase()
    else:
        with pytest.raises(type(error)):
            phase()
    assert (
        first.told
        == second.told
        == [("started", "playing"), ("progress", "playing", 1, 2), ("ended", "playing", outcome)]
    )


def test_a_new_run_tells_its_folder_before_anything_starts(tmp_path: Path, tiny_model_dir: Path) -> None:
    class Stops(Observer):
        def run_folder(self, path: Path) -> None:
            raise RuntimeError(path.name)

    tree = make_config(tmp_path).model_dump(mode="json")
    tree |= {"env": CONFIG["env"], "model": {"path": str(tiny_model_dir)}}
    with pytest.raises(RuntimeError, match=r"^t$"):
        agentrl.train(tree, observer=Stops())
    assert (tmp_path / "t" / "config.json").is_file() and not (tmp_path / "t" / "status.json").exists()
