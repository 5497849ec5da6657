import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config import Config, parse
from agentrl.errors import AgentRLError, ConfigError
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import system, user
from envs.modmath import ModMath
from sandbox.client import SandboxClient
from trainer.warmstart.train import _batches, _lr_share, warmstart


def tiny_config(**changes: int) -> Config:
    small = {
        "vocab_size": 700,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "intermediate_size": 128,
        "demonstrations": 24,
        "steps": 12,
        "batch_size": 4,
    }
    tree = {
        "name": "t",
        "env": {"target": "envs.modmath:ModMath"},
        "model": {"path": "unused", "warmstart": small | changes},
    }
    return parse(tree, source="test")


@pytest.fixture
async def sandbox() -> AsyncIterator[SandboxClient]:
    async with SandboxClient.embedded(slots=2) as client:
        yield client


async def test_progress_rises_to_its_total_and_loss_falls(sandbox: SandboxClient, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = await warmstart(
        tiny_config(steps=60),
        out=tmp_path / "m",
        sandbox=sandbox,
        progress=lambda done, total: seen.append((done, total)),
    )
    await asyncio.sleep(0)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (24 + 60 * 4, 24 + 60 * 4)
    assert report.loss < 5.5  # log(700) = 6.6 before the first step
    tokenizer = TurnTokenizer.load(str(tmp_path / "m"))  # runs the renderer's own self-test
    task = next(iter(ModMath.tasks("test")))
    prompt = tokenizer.first_prompt([system(ModMath.system_prompt), user(task.prompt)], ModMath.tool_schemas())
    assert len(prompt) <= 130
    assert report.action_tokens <= 80 and report.episode_tokens <= 300


async def test_same_seed_same_weights(sandbox: SandboxClient, tmp_path: Path) -> None:
    for name in ("a", "b"):
        await warmstart(tiny_config(), out=tmp_path / name, sandbox=sandbox)
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("a", "b"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


async def test_existing_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        await warmstart(tiny_config(), out=tmp_path, sandbox=None)  # type: ignore[arg-type]


async def test_environment_without_demonstrations_is_refused(sandbox: SandboxClient, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"id": "a", "problem": "1+1?", "answer": "2"}) + "\n")
    config = tiny_config()
    env = config.env.model_copy(update={"target": "envs.aime:AimePython", "train_data": str(rows)})
    with pytest.raises(ConfigError, match="no demonstration"):
        await warmstart(config.model_copy(update={"env": env}), out=tmp_path / "m", sandbox=sandbox)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("tasks", "script", "saying"),
    [
        ("[]", "[]", "has no training tasks"),
        ('[Task(id="a", prompt="?", answer="1")]', "[]", "no demonstration of task a"),
        (
            '[Task(id="a", prompt="?", answer="1")]',
            '{}["x"]',
            r"demonstrations of task a: KeyError: 'x' \(.*:9\)",
        ),
        ('[Task(id="a", prompt="?", answer="1")]', '[{"role": "user"}]', r"a message is `user.* \(.*mine.py:6\)"),
    ],
)
async def test_what_is_wrong_with_the_demonstrations_is_named(
    tmp_path: Path, tasks: str, script: str, saying: str
) -> None:
    (tmp_path / "mine.py").write_text(
        "from agentrl import Task, ToolEnv, user\n"
        "class Mine(ToolEnv):\n"
        "    @classmethod\n"
        "    def tasks(cls, split, *, data=None, seed=0):\n"
        f"        return {tasks}\n"
        "    @classmethod\n"
        "    def demonstrations(cls, task, *, skill=1.0, seed=0):\n"
        "        # the script\n"
        f"        return {script}\n"
        "    async def reset(self, *, task, seed=None):\n"
        "        return [user(task.prompt)], {}\n"
    )
    config = tiny_config()
    env = config.env.model_copy(update={"target": f"{tmp_path / 'mine.py'}:Mine"})
    with pytest.raises(AgentRLError, match=saying):
        await warmstart(config.model_copy(update={"env": env}), out=tmp_path / "m", sandbox=None)  # type: ignore[arg-type]


async def test_cancelling_in_mid_training_stops_soon_and_leaves_nothing(sandbox: SandboxClient, tmp_path: Path) -> None:
    training = asyncio.Event()
    config = tiny_config(steps=100_000)

    def progress(done: int, total: int) -> None:
        if done > 24 + 8:
            training.set()

    job = asyncio.create_task(warmstart(config, out=tmp_path / "m", sandbox=sandbox, progress=progress))
    async with asyncio.timeout(60):
        await training.wait()
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
    assert list(tmp_path.iterdir()) == []


def test_an_epoch_of_batches_shows_every_example_once() -> None:
    examples = [([i] * (1 + i % 7), [1] * (1 + i % 7)) for i in range(100)]
    stream = _batches(examples, 8, seed=0)
    shown: list[int] = []
    while len(shown) < 100:
        shown += [ids[0] for ids, _ in next(stream)]
    assert sorted(shown) == list(range(100))


def test_learning_rate_warms_up_and_decays() -> None:
    shares = [_lr_share(step, 400) for step in range(400)]
    assert shares[0] == pytest.approx(1 / 50)
    assert max(shares) > 0.9 and shares[-1] < 0.03
    assert shares.index(max(shares)) in range(45, 55)
