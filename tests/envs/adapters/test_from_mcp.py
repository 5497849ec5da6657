"""Tools of real MCP servers, over stdio and HTTP: offered as they are, called, failed, and always ended."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agentrl import env as environments
from agentrl.check import check_env
from agentrl.env import Action, Env, Episode, ToolEnv, load_env_class, play_script
from agentrl.errors import ConfigError, EnvError
from agentrl.supervision.serving import free_port
from agentrl.testing import call
from agentrl.tools import tool
from agentrl.types import Message, Task, user
from envs.adapters.from_mcp import from_mcp
from envs.adapters.questions import Questions

on_the_workers_loop = pytest.mark.asyncio(loop_scope="module")
SERVER = Path(__file__).with_name("mcp_notes.py")
STDIO = f"{sys.executable} {SERVER} stdio"
TASK = Task(id="t", prompt="How many?", answer="2 notes")


class Own(ToolEnv):
    """An environment with a tool, shared resources and a score of its own."""

    @classmethod
    def tasks(cls, split: Any, *, data: str | None = None, seed: int = 0) -> list[Task]:
        return [TASK]

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    @tool
    def think(self, thought: str) -> str:
        """Think."""
        return "ok"

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(episode.final_text == episode.task.answer)}


@pytest.fixture(scope="module")
def notes() -> type[ToolEnv]:
    return from_mcp(STDIO, base=Own, lifetime="worker", env={"NOTES_KEY": "secret"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def make_env(notes: type[ToolEnv]) -> AsyncIterator[Callable[[], Env]]:
    """Episodes of one worker, whose server ends with it."""
    async with environments.opened(notes) as make:
        yield make
        pid = int((await answers(make(), call("pid")))[0][0].split()[0])
        assert is_alive(pid)
    assert await gone(pid)


async def answers(env: Env, *calls: Message) -> tuple[list[str], dict[str, float]]:
    """What the calls of one episode come to."""
    counts: dict[str, float] = {}
    try:
        await environments.start(env, TASK, 0)
        texts = []
        for message in calls:
            result = await environments.advance(env, Action(message=message))
            environments.add_counts(counts, result.info)
            texts += [m.content for m in result.observation]
        return texts, counts
    finally:
        await environments.close(env)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pid: int) -> bool:
    """Whether the process ends within a few seconds."""
    for _ in range(100):
        if not is_alive(pid):
            return True
        await asyncio.sleep(0.05)
    return False


def test_the_servers_schema_is_offered_word_for_word(notes: type[ToolEnv]) -> None:
    schemas = {schema["function"]["name"]: schema["function"] for schema in notes.tool_schemas()}
    assert list(schemas) == ["think", "add_note", "show", "fail", "die", "pid"]
    added = schemas["add_note"]
    assert added["description"] == "Write a note down."
    times = added["parameters"]["properties"]["times"]
    assert (times["minimum"], times["maximum"], times["default"], times["description"]) == (1, 3, 1, "how often")
    assert added["parameters"]["required"] == ["text"]


@on_the_workers_loop
async def test_one_server_serves_all_episodes_of_a_worker(make_env: Callable[[], Env]) -> None:
    told = [await answers(make_env(), call("pid"), call("add_note", text="x")) for _ in range(2)]
    (first, one), (second, two) = [texts for texts, _ in told]
    assert (one, two) == ("1 notes", "2 notes")
    assert first == second
    assert first.split()[1] == "secret"


@on_the_workers_loop
async def test_arguments_are_checked_before_the_call(make_env: Callable[[], Env]) -> None:
    wrong: list[dict[str, Any]] = [{}, {"text": 3}, {"text": "x", "times": 9}]
    texts, counts = await answers(make_env(), *[call("add_note", **arguments) for arguments in wrong])
    assert texts == [
        "Error: 'text' is a required property",
        "Error: argument 'text': 3 is not of type 'string'",
        "Error: argument 'times': 9 is greater than the maximum of 3",
    ]
    assert counts["tool_errors"] == 3
    assert (await answers(make_env(), call("add_note", text="x", times=3)))[0][0].endswith("notes")


@on_the_workers_loop
async def test_what_is_no_text_is_named(make_env: Callable[[], Env]) -> None:
    texts, _ = await answers(make_env(), *[call("show", kind=kind) for kind in ("image", "audio", "link", "resource")])
    assert texts == [
        "[image: image/png, 5 bytes]",
        "[audio: audio/wav, 5 bytes]",
        "[resource: readme, file:///readme.md]",
        "Here:\n[resource: file:///a.txt]\naaa",
    ]


@on_the_workers_loop
async def test_an_error_of_the_tool_is_the_models_to_read(make_env: Callable[[], Env]) -> None:
    texts, counts = await answers(make_env(), call("fail", reason="no such file: ∑"), call("think", thought="hm"))
    assert "no such file: ∑" in texts[0]
    assert texts[0].startswith("Error: ")
    assert texts[1] == "ok"
    assert counts["tool_errors"] == 1


@on_the_workers_loop
async def test_a_server_that_dies_is_infrastructure_and_the_next_episode_has_a_new_one(
    make_env: Callable[[], Env],
) -> None:
    with pytest.raises(EnvError, match="dying as told"):
        await answers(make_env(), call("die"))
    texts, _ = await answers(make_env(), call("add_note", text="again"))
    assert texts == ["1 notes"]  # of a process that has none yet


@on_the_workers_loop
async def test_our_check_passes(make_env: Callable[[], Env], notes: type[ToolEnv]) -> None:
    class Unscored(notes):  # type: ignore[valid-type,misc]
        @classmethod
        def tasks(cls, split: Any, *, data: str | None = None, seed: int = 0) -> list[Task]:
            return [Task(id="t", prompt="Anything?")]

    assert "fail" in Unscored.tools
    Unscored.tools = {name: spec for name, spec in Unscored.tools.items() if name in ("fail", "think")}
    report = await check_env(Unscored, data=None, sandbox=None)
    assert [check for check in report.checks if not check.ok] == []


async def test_a_target_without_code_of_ones_own_passes_our_check(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a", "prompt": "How many notes are there?", "answer": "none"}\n')
    env_class = load_env_class(f"mcp:{STDIO}", {"tools": ["add_note"]})
    report = await check_env(env_class, data=str(rows), sandbox=None, timeout_s=60)
    assert [check for check in report.checks if check.level != "ok"] == []
    assert report.checks[-1].detail == "the gold answer scores 1 and a wrong one 0 on 1 task"


async def test_a_server_ends_also_when_its_owner_is_killed() -> None:
    program = (
        "import asyncio, sys\n"
        "from envs.adapters.mcp_connection import McpConnection, McpServer\n"
        "async def main():\n"
        "    connection = await McpConnection.open(McpServer(place=sys.argv[1], env={'NOTES_STAYS': '1'}))\n"
        "    print((await connection.call('pid', {})).content[0].text, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, STDIO], stdout=subprocess.PIPE, text=True, cwd=SERVER.parents[3]
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline().split()[0])
        assert is_alive(pid)
        owner.send_signal(signal.SIGKILL)
    assert await gone(pid)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([sys.executable, str(SERVER), "http", str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(600):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.kill()


async def test_a_running_server_over_http(url: str) -> None:
    env_class = load_env_class(
        f"mcp:{url}", {"base": f"{__file__}:Own", "prefix": "notes_", "tools": ["add_note", "fail"]}
    )
    assert list(env_class.tools) == ["think", "notes_add_note", "notes_fail"]
    script: Sequence[Message] = [
        call("notes_add_note", text="a", times=2),
        call("notes_fail", reason="because"),
        Message(role="assistant", content="2 notes"),
    ]
    episode = await play_script(env_class(), TASK, script)
    assert episode.reward == 1.0
    shown = [m.content for m in episode.messages if m.role == "tool"]
    assert shown[0] == "2 notes"
    assert "because" in shown[1]


async def test_a_url_behind_which_nobody_is_raises_infrastructure(url: str) -> None:
    env_class = from_mcp(url, base=Own)
    texts, _ = await answers(env_class(), call("think", thought="x"))
    assert texts == ["ok"]
    with pytest.raises(EnvError, match=r"MCP server http.* tool die"):
        await answers(env_class(), call("die"))
    with pytest.raises(EnvError, match="cannot be reached"):
        await answers(env_class(), call("think", thought="x"))


async def test_an_episodes_server_is_its_own_ends_with_it_and_must_offer_the_same_tools(monkeypatch: Any) -> None:
    monkeypatch.setenv("AGENTRL_TEST_EXTRA", "1")
    changing = from_mcp(STDIO, base=Own, lifetime="episode", env={"NOTES_EXTRA": "env:AGENTRL_TEST_EXTRA"})
    assert "extra" in changing.tools
    async with environments.opened(changing) as make:
        calls = (call("pid"), call("add_note", text="x"))
        first, second = await asyncio.gather(*[answers(make(), *calls) for _ in range(2)])
    assert [first[0][1], second[0][1]] == ["1 notes"] * 2
    pids = [int(texts[0].split()[0]) for texts, _ in (first, second)]
    assert len(set(pids)) == 2
    assert all([await gone(pid) for pid in pids])
    monkeypatch.setenv("AGENTRL_TEST_EXTRA", "")
    with pytest.raises(EnvError, match=r"changed its tools \['extra'\]"):
        await answers(changing(), call("think", thought="x"))


@pytest.mark.parametrize(
    ("place", "options", "said"),
    [
        ("", {}, "needs a command or a URL"),
        ("http://127.0.0.1:9/mcp", {"env": {"A": "b"}}, "`headers` for a URL"),
        ("/no/such/program", {}, "No such file|cannot be reached"),
        (f"{sys.executable} -c pass", {}, "cannot be reached"),
        (STDIO, {"lifetime": "ever"}, "must be 'worker' or 'episode'"),
        (STDIO, {"base": "gymnasium:FrozenLake-v1"}, "is not a ToolEnv"),
        (STDIO, {"no_such_option": 1}, "no_such_option"),
        (STDIO, {"env": {"A": "env:NO_SUCH_VARIABLE"}}, "NO_SUCH_VARIABLE is not set"),
    ],
)
def test_what_cannot_be_adapted_is_a_config_error(place: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_env_class(f"mcp:{place}", {"start_timeout_s": 10.0, **options})


async def test_questions_come_from_a_file_and_are_compared_leniently(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "q", "problem": "Capital of France?", "answer": "Paris"}\n')
    (task,) = Questions.tasks("train", data=str(rows))
    rewards = []
    for said in ("I looked.\nAnswer: paris.", "Paris", "London", "Paris or London", ""):
        episode = await play_script(Questions(), task, [Message(role="assistant", content=said)])
        rewards.append(episode.reward)
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match=r"env\.train_data"):
        list(Questions.tasks("train"))
