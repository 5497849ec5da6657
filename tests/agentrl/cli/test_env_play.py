"""A person plays: lines in, episode out. The environment is closed however the episode ends."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from rich.console import Console

from agentrl.cli.env_play import InputLines, TerminalSpeaker, parse_call
from agentrl.env import Env, Episode, StepResult, ToolEnv
from agentrl.env.base import Action
from agentrl.errors import EnvError
from agentrl.tools import tool
from agentrl.types import Message, Task, user

TASK = Task(id="t", prompt="What does it say?", answer="xyzzy")


class Cave(ToolEnv):
    max_turns = 3
    was_closed = False

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    @tool
    async def look(self, where: Annotated[str, "a direction, or a thing"], times: int = 1) -> str:
        """Look somewhere."""
        if where == "down":
            raise RuntimeError("fell")
        return f"{where} " * times

    async def step(self, action: Action) -> StepResult:
        return (await super().step(action))._replace(reward=0.5)

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(episode.task.answer == episode.final_text)}

    async def close(self) -> None:
        self.was_closed = True


async def play(typed: str, env: Env | None = None) -> tuple[Episode | None, str]:
    """The episode of somebody who types this, and what was shown."""
    read_fd, write_fd = os.pipe()
    os.write(write_fd, typed.encode())
    os.close(write_fd)
    shown = io.StringIO()
    speaker = TerminalSpeaker(Console(file=shown, width=100), InputLines(read_fd))
    try:
        return await speaker.play(env or Cave(), TASK, 0), shown.getvalue()
    finally:
        os.close(read_fd)


async def test_calls_are_run_and_text_is_said() -> None:
    episode, shown = await play('look(where="up", times=2)\n{"name": "look", "arguments": {"where": "é"}}\nxyzzy\n')
    assert episode is not None
    assert [m.content for m in episode.messages if m.role == "tool"] == ["up up ", "é "]
    assert (episode.rewards, episode.reward) == ({"correct": 1.0, "step": 1.5}, 2.5)
    for text in ("look(where: string, times: integer)", "What does it say?", "reward 2.5", "gold answer: xyzzy"):
        assert text in shown


async def test_a_last_line_without_an_end_counts() -> None:
    episode, _ = await play("xyzzy")
    assert episode is not None
    assert episode.reward == 1.5


@pytest.mark.parametrize("typed", ["", "/quit\n", 'look(where="up")\n'])
async def test_leaving_early_closes_and_scores_nothing(typed: str) -> None:
    env = Cave()
    episode, shown = await play(typed, env)
    assert episode is None
    assert env.was_closed
    assert "not scored" in shown


async def test_a_call_may_go_over_several_lines() -> None:
    episode, _ = await play('look(where="""a\nb""",\n times=1)\nxyzzy\n')
    assert episode is not None
    assert episode.messages[2].content == "a\nb "


async def test_a_call_without_names_of_arguments_is_not_sent() -> None:
    episode, shown = await play("look('up')\nxyzzy\n")
    assert episode is not None and episode.final_text == "xyzzy" and len(episode.messages) == 2
    assert "not sent: write each argument with its name" in " ".join(shown.split())


async def test_the_tools_are_shown_with_what_their_parameters_mean() -> None:
    _, shown = await play("/quit\n")
    assert "tool look(where: string, times: integer)\n     Look somewhere.\n" in shown
    assert "     where: a direction, or a thing\n" in shown


async def test_commands_are_not_said() -> None:
    episode, shown = await play("\n/help\n/tools\n/nonsense\nxyzzy\n")
    assert episode is not None
    assert len(episode.messages) == 2
    assert "no such command: /nonsense" in shown


async def test_a_failing_tool_ends_it_as_a_failure_and_closes() -> None:
    env = Cave()
    with pytest.raises(EnvError, match="tool look: RuntimeError: fell"):
        await play('look(where="down")\n', env)
    assert env.was_closed


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("hello (there)", "text"),
        ("look up", "text"),
        ("look()", ("look", {})),
        (
            "look(where='a', times=-2, deep=[1, {'b': None}])",
            ("look", {"where": "a", "times": -2, "deep": [1, {"b": None}]}),
        ),
        ("look(where=true)", ("look", {"where": True})),
        ("look('up')", "wrong"),
        ("look(where=open('x'))", "wrong"),
        ("jump(where='up')", "text"),
        ("look(where=", "incomplete"),
        ('{"name": "look"}', ("look", {})),
        ('{"name": "look", "arguments": [1]}', "text"),
        ('{"name": "look",', "incomplete"),
        ("{not json}", "text"),
        ("{}", "text"),
    ],
)
def test_what_is_a_call(text: str, call: Any) -> None:
    assert parse_call(text, ["look"]) == call


def test_ctrl_c_closes_the_episode(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\nfrom tests.agentrl.cli.test_env_play import Cave, TASK\n"
        "class Mine(Cave):\n"
        "    @classmethod\n    def tasks(cls, split, *, data=None, seed=0):\n        return [TASK]\n"
        f"    async def close(self):\n        Path('{tmp_path}/closed').touch()\n"
    )
    command = [sys.executable, "-m", "agentrl", "env", "play", f"{tmp_path}/mine.py:Mine"]
    player = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert player.stdin is not None
    assert player.stdout is not None
    try:
        shown = b""
        while b"you> " not in shown:
            shown += (read := os.read(player.stdout.fileno(), 4096))
            assert read, shown
        player.send_signal(signal.SIGINT)
        _, errors = player.communicate(timeout=60)
    finally:
        player.kill()
    assert player.returncode == 130
    assert b"interrupted: the episode was closed" in errors
    assert (tmp_path / "closed").exists()
