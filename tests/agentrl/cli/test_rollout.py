"""`agentrl rollout`: a model plays, and a person reads."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from agentrl.cli.evaluate import Request
from agentrl.cli.options import PlayOptions
from agentrl.cli.rollout import Sample, sample_episodes
from agentrl.config import Config
from agentrl.errors import ConfigError
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
def config(tmp_path: Path) -> Config:
    (tmp_path / "echo_env.py").write_text(ENVIRONMENT)
    return Config.model_validate(
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


@asynccontextmanager
async def endpoint() -> AsyncIterator[str]:
    """A chat model that looks once, then says the last number it was told."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def complete(sent: dict[str, Any]) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"where": "up"}'}}
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
        if len(sent["messages"]) > 1:
            message = {"role": "assistant", "content": sent["messages"][0]["content"].strip("Say .")}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}

    async with serving(app, host="127.0.0.1", port=0) as url:
        yield f"{url}/v1"


def asked(config: Config, **options: Any) -> Request:
    return Request.from_options(config, PlayOptions(samples=2, limit=1, **options), environ={})


def sample(request: Request, **wanted: Any) -> Sample:
    return Sample(**{"request": request, "task_id": None, "show": False, "tokens": False, "save": None, **wanted})


async def test_episodes_are_shown_and_saved(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save = tmp_path / "episodes.jsonl"
    async with endpoint() as url:
        request = asked(config, model=url, served_model="m")
        groups = await sample_episodes(sample(request, task_id="row-2", show=True, save=save))
    assert [trajectory.reward for trajectory in groups[0].trajectories] == [2.0, 2.0]  # the config's wrapper was there
    shown = capsys.readouterr().out
    for text in ("task row-2", '→ look(where="up")', "      nothing up", "reward 2 (correct 1)", "ended: completed"):
        assert text in shown
    lines = [json.loads(line) for line in save.read_text().splitlines()]
    assert [(line["task"]["id"], line["reward"], len(line["messages"])) for line in lines] == [("row-2", 2.0, 4)] * 2


async def test_what_cannot_be_done_is_refused_before_anything_starts(config: Config, tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").touch()
    request = asked(config, model="http://127.0.0.1:9/v1", served_model="m")
    for wanted, reason in (
        ({"tokens": True}, "does not return token ids"),
        ({"save": tmp_path / "old.jsonl"}, "nothing is overwritten"),
        ({"task_id": "row-9"}, "no test task with id 'row-9'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            await sample_episodes(sample(request, **wanted))


@pytest.mark.engine
async def test_tokens_of_a_real_engine_are_shown(
    config: Config, vllm_server: VLLMServer, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = asked(config, model=vllm_server.url, tokenizer=str(tiny_model_dir))
    ((group),) = await sample_episodes(sample(request, tokens=True))
    shown = capsys.readouterr().out.splitlines()
    first = group.trajectories[0]
    assert sum("not trained on" in line for line in shown) == sum(
        trajectory.action_mask().count(0) for trajectory in group.trajectories
    )
    position = first.action_mask().index(1)
    logprob, version = first.behavior_logprobs()[position], first.policy_versions()[position]
    assert any(line.startswith(f"{position:6d}  v{version} {logprob:8.3f}") for line in shown)
