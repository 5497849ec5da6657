"""`agentrl rollout`: a model plays, and a person reads."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fastapi import FastAPI
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.supervision.serving import serving
from tests.conftest import VLLMServer

ENVIRONMENT = '''
from agentrl import Task, ToolEnv, tool, user


class Echo(ToolEnv):
    @classmethod
    def tasks(cls, split, *, data=None, seed=0):
        return [Task(id=f"row-{n}", prompt=f"Say {n}.", answer=str(n)) for n in range(3)]

    async def reset(self, *, task, seed=None):
        return [user(task.prompt)], {}

    @tool
    async def look(self, where: str) -> str:
        """Look."""
        return f"nothing {where}"

    async def score(self, episode):
        return {"correct": float(episode.final_text == episode.task.answer)}
'''


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "echo_env.py").write_text(ENVIRONMENT)
    path = tmp_path / "config.yaml"
    path.write_text(
        json.dumps(
            {
                "name": "x",
                "env": {
                    "target": f"{tmp_path}/echo_env.py:Echo",
                    "max_turns": 3,
                    "wrappers": [{"RewardScale": {"scale": 2.0}}],
                },
                "model": {"path": "unused"},
                "rollout": {"max_context": 512, "max_turn_tokens": 24, "tool_output_tokens": 16},
                "sandbox": {"backend": "unsafe", "allow_unsafe": True},
            }
        )
    )
    return path


@asynccontextmanager
async def endpoint() -> AsyncIterator[str]:
    """A chat model that looks once, then says the last number it was told."""
    server = FastAPI()

    @server.post("/v1/chat/completions")
    async def complete(sent: dict[str, Any]) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"where": "up"}'}}
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
        if len(sent["messages"]) > 1:
            message = {"role": "assistant", "content": sent["messages"][0]["content"].strip("Say .")}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}

    async with serving(server, host="127.0.0.1", port=0) as url:
        yield f"{url}/v1"


def rollout(config: Path, *options: object) -> Result:
    return CliRunner().invoke(app, ["rollout", str(config), "-n", "2", *map(str, options)], env={"COLUMNS": "120"})


async def test_episodes_are_shown_and_saved(config: Path, tmp_path: Path) -> None:
    save = tmp_path / "episodes.jsonl"
    async with endpoint() as url:
        options = ("--model", url, "--served-model", "m", "--task", "row-2", "--show", "--save", save)
        done = await asyncio.to_thread(rollout, config, *options)
    assert done.exit_code == 0, done.output
    for text in ("task row-2", '→ look(where="up")', "      nothing up", "reward 2 (correct 1)", "ended: completed"):
        assert text in done.stdout
    lines = [json.loads(line) for line in save.read_text().splitlines()]
    # Twice the reward: the config's wrapper was there.
    assert [(line["task"]["id"], line["reward"], len(line["messages"])) for line in lines] == [("row-2", 2.0, 4)] * 2


async def test_an_eval_shows_every_set_and_a_rollout_plays_one(config: Path, tmp_path: Path) -> None:
    tree = json.loads(config.read_text())
    (tmp_path / "never_env.py").write_text(ENVIRONMENT.replace("== episode.task.answer", "is None"))
    sets = {"said": {"num_tasks": 2}, "never": {"target": f"{tmp_path}/never_env.py:Echo", "samples_per_task": 1}}
    config.write_text(json.dumps(tree | {"eval": {"samples_per_task": 2, "sets": sets}}))

    def run(command: str, *options: str) -> Result:
        return CliRunner().invoke(app, [command, str(config), *options], env={"COLUMNS": "120"})

    async with endpoint() as url:
        model = ("--model", url, "--served-model", "m")
        both = await asyncio.to_thread(run, "eval", *model)
        one = await asyncio.to_thread(run, "rollout", *model, "--set", "never", "-n", "1")
    assert both.exit_code == one.exit_code == 0, both.output + one.output
    said, never = (
        both.stdout.index("said: 2 tasks, 2 samples each"),
        both.stdout.index("never: 3 tasks, 1 samples each"),
    )
    assert said < both.stdout.index("1.000") < never < both.stdout.index("0.000 to", never)
    assert "reward 0" in one.stdout


def test_what_cannot_be_done_is_refused_before_anything_starts(config: Path, tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").touch()
    for wanted, reason in (
        (("--tokens",), "does not return token ids"),
        (("--save", tmp_path / "old.jsonl"), "nothing is overwritten"),
        (("--task", "row-9"), "no test task with id 'row-9'"),
    ):
        done = rollout(config, "--model", "http://127.0.0.1:9/v1", "--served-model", "m", *wanted)
        assert done.exit_code == 2
        assert reason in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.engine
def test_tokens_of_a_real_engine_are_shown(
    config: Path, vllm_server: VLLMServer, tiny_model_dir: Path, tmp_path: Path
) -> None:
    save = tmp_path / "episodes.jsonl"
    options = ("--model", vllm_server.url, "--tokenizer", tiny_model_dir, "--tokens", "--save", save)
    done = rollout(config, *options)
    shown = done.stdout.splitlines()
    episodes = [json.loads(line) for line in save.read_text().splitlines()]
    assert sum("not trained on" in line for line in shown) == sum(
        episode["action_mask"].count(0) for episode in episodes
    )
    first = episodes[0]
    position = first["action_mask"].index(1)
    logprob, version = first["behavior_logprobs"][position], first["policy_versions"][position]
    assert any(line.startswith(f"{position:6d}  v{version} {logprob:8.3f}") for line in shown)
