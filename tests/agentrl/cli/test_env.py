"""The commands of `agentrl env`, in this process."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentrl.cli.main import app

SIZED = """
from agentrl import Env, StepResult, Task, user


class Sized(Env):
    def __init__(self, *, size):
        self.size = size

    @classmethod
    def tasks(cls, split, *, data=None, seed=0):
        return [Task(id=str(n), prompt="?") for n in range(cls.kwargs["size"])]

    async def reset(self, *, task, seed=None):
        return [user("x" * self.size)], {}

    async def step(self, action):
        return StepResult([], 0.5, True, False, {})
"""


def agentrl(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_environments_are_listed_with_place_and_purpose() -> None:
    done = agentrl("env", "list")
    assert done.exit_code == 0
    (line,) = [line for line in done.output.splitlines() if line.startswith("ModMath-v0 ")]
    assert "envs.modmath:ModMath" in line
    assert "answers from 0 to 999" in line


@pytest.mark.parametrize("kind", ["--tool", "--no-tool"])
def test_a_new_file_is_written_once(tmp_path: Path, kind: str) -> None:
    first = agentrl("env", "new", "MyShop", kind, "--in", str(tmp_path))
    assert first.exit_code == 0
    assert f"agentrl env check {tmp_path}/my_shop.py:MyShop" in first.output
    assert f"name=my_shop env.target={tmp_path}/my_shop.py:MyShop model.path=models/my_shop" in first.output
    assert "writes runs/my_shop/" in first.output
    assert ("@tool" in (tmp_path / "my_shop.py").read_text()) == (kind == "--tool")
    again = agentrl("env", "new", "MyShop", kind, "--in", str(tmp_path))
    assert again.exit_code == 2


def test_arguments_of_the_constructor_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "sized.py").write_text(SIZED)
    done = agentrl("env", "check", f"{tmp_path}/sized.py:Sized", "--arg", "size=3")
    assert done.exit_code == 0, done.output
    assert "tasks: 3 tasks" in done.output


@pytest.mark.parametrize("argument", ["size", "=3", "size=[", "colour=3"])
def test_arguments_that_cannot_be_are_refused(tmp_path: Path, argument: str) -> None:
    (tmp_path / "sized.py").write_text(SIZED)
    for command in ("check", "play"):
        assert agentrl("env", command, f"{tmp_path}/sized.py:Sized", "--arg", argument).exit_code == 2
