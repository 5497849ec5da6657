"""Runs whose episodes are played by real worker processes, against a server with vLLM's API.

They train what a run in one process trains, also when workers are killed, stopped, or blocked by an environment's code.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentrl.buffer.journal import Journal
from agentrl.config import Config, parse
from agentrl.engine.pool import EnginePool
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.env import load_env_class
from agentrl.run_folder import RunFolder
from agentrl.supervision.child import Child
from agentrl.supervision.secrets import Secrets
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Batch, Completion
from agentrl.workers.dispatcher import Dispatcher
from agentrl.workers.launch import rollout_workers, workers_ready
from agentrl.workers.records import RunInfo
from tests.agentrl.engine.vllm_double import Chunks, VLLMDouble, vllm_double
from tests.agentrl.training.whole_run import held_out_sets, obedient_learner, orchestrating
from tests.agentrl.workers import worlds
from tests.e2e.kill_judge import fates

SECRETS = Secrets(run="secret", sandbox="box", engine=None)
STEPS = 3
SETS = {"words": {}, "short": {"target": "tests.agentrl.workers.worlds:Short", "samples_per_task": 1}}


def config_of(tmp_path: Path, tokenizer_dir: Path, *, world: str = "Words", workers: int = 2, **rollout: Any) -> Config:
    return parse(
        {
            "name": f"with-{workers}",
            "out_dir": str(tmp_path),
            "env": {"target": f"tests.agentrl.workers.worlds:{world}"},
            "model": {"path": str(tokenizer_dir)},
            "rollout": {"groups_per_step": 3, "group_size": 4, "max_lag": 0, "workers": workers} | rollout,
            "engine": {"request_seeds": True},
            "learner": {"start_timeout_s": 20, "step_timeout_s": 20},
            "train": {"steps": STEPS, "stall_timeout_s": 60},
            "eval": {"num_tasks": 3, "samples_per_task": 2, "every": 2, "sets": SETS},
        },
        source="test",
    )


SEEN = [("words", 2, 3.0), ("short", 1, 1.0)]


@dataclass
class Run:
    """What a run trained, and what it knows of its workers."""

    folder: RunFolder
    batches: list[Batch] = field(default_factory=list)
    num_lost: int = 0
    num_refused: int = 0

    def trained(self) -> list[Any]:
        """Of each batch the groups, and of each episode its turns, with log-probabilities and versions, and reward."""
        return [
            [
                (
                    group.group_id,
                    group.task,
                    [(one.id, one.turns, one.messages, one.reward) for one in group.trajectories],
                )
                for group in batch.groups
            ]
            for batch in self.batches
        ]

    def evaluated(self) -> list[Any]:
        journal = Journal(self.folder.journal)
        try:
            return journal.evaluations()
        finally:
            journal.close()


Workers = tuple[Dispatcher, list[Child]]
Disturb = Callable[[Dispatcher, list[Child]], Coroutine[Any, Any, None]]


async def undisturbed(dispatcher: Dispatcher, parts: list[Child]) -> None:
    """Nothing happens."""


@asynccontextmanager
async def playing(
    config: Config, engine: VLLMEngine | EnginePool, folder: RunFolder
) -> AsyncIterator[tuple[Dispatcher, list[Child]]]:
    info = RunInfo(
        config=config.model_dump(mode="json"), model_path=config.model.path, sandbox_url="http://127.0.0.1:9"
    )
    graph = WaitGraph()
    async with rollout_workers(config, engine, info, secrets=SECRETS, logs=folder.logs, wait_graph=graph) as (
        dispatcher,
        parts,
    ):
        await workers_ready(dispatcher, parts, graph)
        yield dispatcher, parts


async def whole_run(
    config: Config,
    tokenizer: TurnTokenizer,
    *,
    disturb: Disturb = undisturbed,
    prepare: Callable[[VLLMDouble], None] = lambda double: None,
    num_others: int = 0,
) -> Run:
    """A run with its learner. `prepare` changes the server before; `num_others`: servers beside it, left as they are.

    The engine's answers take different times, so that groups end in any order.
    """
    env_class = load_env_class(config.env.target)
    run = Run(RunFolder.create(config.out_dir, config.name, config=config))
    async with asyncio.timeout(100), AsyncExitStack() as stack:
        doubles = [
            await stack.enter_async_context(vllm_double(worlds.SeededWords(tokenizer, latency_s=0.05)))
            for _ in range(1 + num_others)
        ]
        clients = [VLLMEngine(double.url) for double in doubles]
        engine = await stack.enter_async_context(EnginePool(clients) if num_others else clients[0])
        prepare(doubles[0])
        if not config.rollout.has_workers:
            await _steps(config, engine, tokenizer, run, env_class=env_class)
            return run
        async with playing(config, engine, run.folder) as (dispatcher, parts):
            watching = [asyncio.create_task(part.watch()) for part in parts]
            disturbing = asyncio.create_task(disturb(dispatcher, parts))
            try:
                await _steps(config, engine, tokenizer, run, env_class=env_class, dispatcher=dispatcher)
                await disturbing
            finally:
                for task in (*watching, disturbing):
                    task.cancel()
            run.num_lost, run.num_refused = dispatcher.num_lost, dispatcher.num_refused
    return run


async def _steps(
    config: Config, engine: VLLMEngine | EnginePool, tokenizer: TurnTokenizer, run: Run, **parts: Any
) -> None:
    parts["held_out"] = held_out_sets(config, tokenizer, parts.get("dispatcher"))
    async with orchestrating(config, engine, tokenizer, run=run.folder, **parts) as (orchestrator, url):
        weights_dir = run.folder.path / "weights" if isinstance(engine, EnginePool) else None  # what all can take
        learner = asyncio.create_task(obedient_learner(url, run.batches, weights_dir=weights_dir))
        try:
            assert (await orchestrator.run()).num_steps == STEPS
            await learner
        finally:
            learner.cancel()


async def test_without_lag_two_workers_make_the_batches_of_one_process_to_the_bit(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: TurnTokenizer
) -> None:
    alone = await whole_run(config_of(tmp_path, tokenizer_dir, workers=0), tokenizer)
    both = await whole_run(config_of(tmp_path, tokenizer_dir), tokenizer)
    assert len(alone.batches) == STEPS and both.trained() == alone.trained()
    assert {"brief"} < {name for batch in both.batches for one in batch.trajectories() for name in one.rewards}
    assert any(one.reward % 1.0 for batch in both.batches for one in batch.trajectories())  # a share of its group
    assert both.evaluated() == alone.evaluated()
    assert [(one.set_name, one.n, one.turns_mean) for one in both.evaluated()[-2:]] in (SEEN, SEEN[::-1])
    assert (both.num_lost, both.num_refused) == (0, 0)


@pytest.mark.slow
async def test_with_lag_tokens_carry_the_version_that_made_them_also_when_weights_change_within_an_episode(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: TurnTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probabilities of an answer say which version made it."""
    monkeypatch.setenv(worlds.PLACE, str(tmp_path))

    async def tell(dispatcher: Dispatcher, parts: list[Child]) -> None:
        while dispatcher.engine_states[0].version < 1:
            await asyncio.sleep(0.02)
        (tmp_path / "updated").touch()

    def marked(double: VLLMDouble) -> None:
        def mark(chunks: Chunks) -> None:
            for token in chunks[-1]["choices"][0]["logprobs"]["content"]:
                token["logprob"] = -1.0 - double.label

        double.spoil = mark

    config = config_of(tmp_path, tokenizer_dir, world="Overtaken", max_lag=1)
    run = await whole_run(config, tokenizer, disturb=tell, prepare=marked)
    assert len(run.batches) == STEPS and run.num_lost == run.num_refused == 0
    mixed = 0
    for batch in run.batches:
        for group in batch.groups:
            assert batch.policy_version - group.policy_version <= 1, "admission holds"
            for episode in group.trajectories:
                found = [turn.completion for turn in episode.turns]
                versions = [
                    span.version for said in found for span in said.version_spans for _ in range(span.start, span.end)
                ]
                assert [-1.0 - one for one in versions] == [lp for said in found for lp in said.behavior_logprobs]
                mixed += len(set(versions)) > 1
    assert mixed, "an episode went on under other weights"


@pytest.mark.slow
async def test_nothing_is_trained_that_an_engine_said_with_weights_that_fail_their_proof(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: TurnTokenizer
) -> None:
    """The first request under version 1 ends under version 2, before its proof fails. What is said then has other
    log-probabilities."""
    wrong: list[str] = []

    def refused(double: VLLMDouble) -> None:
        def goes_wrong(path: str) -> bool:
            if path == "finish_weight_update" and double.label == 2:
                double.skew = 1.0
            return False

        generate, held = double.engine.generate, asyncio.Event()

        async def held_back(*asked: Any, **options: Any) -> Completion:
            if double.label == 1 and not held.is_set():
                held.set()
                while not double.skew:
                    await asyncio.sleep(0.01)
            return await generate(*asked, **options)

        def mark(chunks: Chunks) -> None:
            if double.skew:
                wrong.append(double.url)
                for token in chunks[-1]["choices"][0]["logprobs"]["content"]:
                    token["logprob"] = -100.0

        double.engine.generate = held_back  # type: ignore[method-assign]
        double.refuses, double.spoil = goes_wrong, mark

    config = config_of(tmp_path, tokenizer_dir, max_lag=1)
    run = await whole_run(config, tokenizer, prepare=refused, num_others=1)
    assert len(run.batches) == STEPS and run.num_lost == run.num_refused == 0
    trained = [turn.completion for batch in run.batches for one in batch.trajectories() for turn in one.turns]
    assert {logprob for said in trained for logprob in said.behavior_logprobs} == {-0.5}
    assert wrong, "it answered with them"


@pytest.mark.slow
async def test_a_worker_that_is_killed_or_stopped_loses_nothing_and_changes_nothing(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: TurnTokenizer
) -> None:
    async def kill_and_stop(dispatcher: Dispatcher, parts: list[Child]) -> None:
        await busy(dispatcher, "rollout-worker-0")
        os.kill(worker_pid(parts[0]), signal.SIGKILL)
        while dispatcher.num_lost < 1:
            await asyncio.sleep(0.05)
        await busy(dispatcher, "rollout-worker-1")
        stopped = worker_pid(parts[1])
        os.kill(stopped, signal.SIGSTOP)  # as a partition: it holds its groups and says nothing
        while dispatcher.num_lost < 2:
            await asyncio.sleep(0.05)
        os.kill(stopped, signal.SIGCONT)
        while len(dispatcher.names) < 2:
            await asyncio.sleep(0.05)

    settings = {"world": "Slow", "worker_timeout_s": 4}
    alone = await whole_run(config_of(tmp_path, tokenizer_dir, workers=0, **settings), tokenizer)
    fired = await whole_run(config_of(tmp_path, tokenizer_dir, **settings), tokenizer, disturb=kill_and_stop)
    assert fired.trained() == alone.trained() and fired.evaluated() == alone.evaluated()
    assert fired.num_lost == 2
    assert fates(fired.folder.journal) == fates(alone.folder.journal), "each group has one fate, and the same"


@pytest.mark.slow
async def test_code_that_blocks_stops_its_worker_alone_and_is_named(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: TurnTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv(worlds.PLACE, str(tmp_path))
    config = config_of(tmp_path, tokenizer_dir, world="Blocking", worker_timeout_s=6)
    run = await whole_run(config, tokenizer)
    assert (tmp_path / "blocked").exists() and len(run.batches) == STEPS and run.num_lost == 1
    assert any("worlds.py" in record.message and "stood still" in record.message for record in caplog.records)
    (stacks,) = run.folder.logs.glob("rollout-worker-*-stacks.txt")
    assert "worlds.py" in stacks.read_text()


@pytest.mark.slow
async def test_a_worker_whose_episodes_compute_for_longer_than_the_time_out_in_one_pass_is_not_given_up(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: TurnTokenizer
) -> None:
    """The first group: 12 s, 3 s an episode, which is less than worker_timeout_s / 2."""
    config = config_of(tmp_path, tokenizer_dir, world="Crowded", workers=1, worker_timeout_s=8)
    run = await whole_run(config, tokenizer)
    assert len(run.batches) == STEPS and run.num_lost == 0


async def busy(dispatcher: Dispatcher, name: str) -> None:
    while not dispatcher.load().get(name):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)


def worker_pid(part: Child) -> int:
    """The worker itself, a child of its guard."""
    children = Path(f"/proc/{part.process.pid}/task/{part.process.pid}/children").read_text().split()
    return int(children[0])
