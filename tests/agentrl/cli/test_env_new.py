"""The files that `agentrl env new` writes work unchanged, and so do the examples that it copies."""

import inspect
from pathlib import Path

import pytest

from agentrl.check import check_env
from agentrl.cli.env_new import write_environment
from agentrl.cli.templates.dialogue_environment import GuessNumber
from agentrl.cli.templates.tool_environment import PriceShop
from agentrl.env import Env, load_env_class, make, play_script
from agentrl.errors import ConfigError


@pytest.mark.parametrize("example", [PriceShop, GuessNumber])
async def test_the_examples_pass_their_check(example: type[Env]) -> None:
    report = await check_env(example, data=None, sandbox=None, limit=8)
    assert report.ok, report


def test_a_copy_differs_from_its_example_in_the_names_alone(tmp_path: Path) -> None:
    path, _ = write_environment("RiverCrossing", tmp_path, tool=True)
    copy = path.read_text()
    assert "PriceShop" not in copy and "price_shop" not in copy
    assert f"agentrl env check {path}:RiverCrossing" in copy and '@register("RiverCrossing-v0")' in copy
    renamed = copy.replace(str(path), "price_shop.py").replace("RiverCrossing", "PriceShop")
    assert renamed == Path(inspect.getfile(PriceShop)).read_text()


@pytest.mark.parametrize("tool", [True, False])
async def test_a_new_environment_passes_its_check_unchanged(tmp_path: Path, tool: bool) -> None:
    path, name = write_environment(f"river crossing {tool}", tmp_path, tool=tool)
    assert (path, name) == (tmp_path / f"river_crossing_{tool}.py".lower(), f"RiverCrossing{tool}")
    report = await check_env(load_env_class(f"{path}:{name}"), data=None, sandbox=None, limit=8)
    assert report.ok, report
    assert bool(load_env_class(f"{path}:{name}").tools) == tool


@pytest.mark.parametrize("tool", [True, False])
async def test_its_demonstrator_is_as_good_as_its_skill(tmp_path: Path, tool: bool) -> None:
    path, name = write_environment(f"Demo{tool}", tmp_path, tool=tool)
    cls = load_env_class(f"{path}:{name}")
    rewards = []
    for task in list(cls.tasks("test"))[:40]:
        script = cls.demonstrations(task, skill=0.5, seed=1)
        assert script is not None
        rewards.append((await play_script(make(cls), task, script)).rewards["correct"])
    assert 0.2 < sum(rewards) / len(rewards) < 0.9


def test_training_tasks_do_not_end_and_differ_from_the_test_tasks(tmp_path: Path) -> None:
    path, name = write_environment("Market", tmp_path, tool=True)  # README.md has a Shop
    cls = load_env_class(f"{path}:{name}")
    train = [task.prompt for task, _ in zip(cls.tasks("train", seed=3), range(500), strict=False)]
    assert len(train) == 500
    assert not set(train) & {task.prompt for task in cls.tasks("test")}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path, _ = write_environment("Mine", tmp_path, tool=True)
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"mine.py exists already; nothing is overwritten"):
        write_environment("mine", tmp_path, tool=False)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["", "3Rivers", "a/b", "../up", "None", "été!"])
def test_a_name_that_makes_no_class_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="makes no class name"):
        write_environment(name, tmp_path, tool=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "saying"),
    [
        ("shop.py", "give the name alone, Shop"),
        ("games/shop.py", "give the name alone, Shop and its folder with --in games"),
        ("ToolEnv", "a class ToolEnv would hide another"),
        ("Task", "a class Task would hide another"),
        ("Exception", "a class Exception would hide another"),
        ("json", "a file json.py would hide the Python module json"),
        ("agentrl", "a file agentrl.py would hide the Python module agentrl"),
        ("class", "a file class.py would hide"),
        ("Sandbox", "a file sandbox.py would hide the Python module sandbox"),
        ("Rich", "a file rich.py would hide the Python module rich"),
        ("ModMath", "the environment ModMath-v0 is there already"),
    ],
)
def test_a_name_that_hides_another_is_refused_with_one_that_does_not(tmp_path: Path, name: str, saying: str) -> None:
    with pytest.raises(ConfigError, match=saying):
        write_environment(name, tmp_path, tool=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_made_and_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    path, _ = write_environment("Shopping", tmp_path / "my" / "games", tool=True)
    assert path == tmp_path / "my" / "games" / "shopping.py" and path.is_file()
    with pytest.raises(ConfigError, match=r"cannot write .*shopping.py/shopping.py: Not a directory|exists already"):
        write_environment("Shopping", path, tool=True)
