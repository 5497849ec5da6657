"""Resumed runs: a learner that died returns at an older version; a whole run is killed and opened again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.buffer.journal import Journal
from agentrl.config import Config
from agentrl.engine.base import WeightUpdate
from agentrl.errors import ConfigError, WeightSyncError
from agentrl.report.metrics import read
from agentrl.report.observer import Summary
from agentrl.run_folder import RunFolder
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training import learner_api as api
from agentrl.training.orchestrator import Orchestrator
from agentrl.training.resume import reopen
from agentrl.types import Batch, WeightsRef
from tests.agentrl.training.whole_run import TOKEN, Quiet, YesAndNo, make_config, obedient_learner, orchestrating


@asynccontextmanager
async def running(
    config: Config, tokenizer: TurnTokenizer, *, run: RunFolder | None = None, engine: YesAndNo | None = None
) -> AsyncIterator[tuple[asyncio.Task[Summary], str, Orchestrator]]:
    engine = engine or YesAndNo(tokenizer, latency_s=0.003)
    async with orchestrating(config, engine, tokenizer, run=run) as (orchestrator, url), asyncio.timeout(60):
        task = asyncio.create_task(orchestrator.run())
        try:
            yield task, url, orchestrator
        finally:
            task.cancel()
            await asyncio.wait({task})


def steps_of(run: RunFolder) -> Counter[int]:
    """Groups trained by each step, as the journal has it."""
    with closing(Journal(run.journal)) as journal:
        rows = journal._rows("SELECT step FROM groups WHERE state = 'trained'")
    return Counter(step for (step,) in rows)


@pytest.mark.parametrize("rollout", [{"max_lag": 0}, {"max_lag": 1}, {"max_lag": 1, "replay": {"recent": 0.5}}])
async def test_a_learner_that_died_gets_the_batches_after_its_checkpoint_again(
    tmp_path: Path, tokenizer: TurnTokenizer, rollout: dict[str, Any]
) -> None:
    config = make_config(tmp_path, steps=5, eval_every=0, **rollout)
    first: list[Batch] = []
    second: list[Batch] = []
    async with running(config, tokenizer) as (run, url, orchestrator):
        await obedient_learner(url, first, name="first", dies_at=3)
        await obedient_learner(url, second, name="second", version=1)
        assert (await run).num_steps == 5
    shown = orchestrator._observer
    assert isinstance(shown, Quiet)
    ((version, last),) = shown.resumptions
    assert version == 1 and shown.made_before == list(range(2, last + 1)) and shown.steps == [1, 2, 3, 4, 5]
    assert [batch.policy_version for batch in first] == [0, 1, 2, 3]
    assert [batch.policy_version for batch in second] == [1, 2, 3, 4]
    assert second[:3] == first[1:]
    assert [batch.num_replayed for batch in second] == [2 if "replay" in rollout else 0] * 4
    folder = RunFolder.open(tmp_path / "t")
    assert steps_of(folder) == dict.fromkeys(range(1, 6), 2)
    lines = read(folder.metrics)
    assert [line.step for line in lines if line.kind == "step"] == [1, 2, 3, 4, 5]
    assert [line.step for line in lines if line.kind == "eval"] == [0, 5]


async def test_the_process_that_was_replaced_is_turned_away(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    async with running(make_config(tmp_path), tokenizer) as (run, url, _):
        await obedient_learner(url, [], name="first", dies_at=1)
        second = asyncio.create_task(obedient_learner(url, [], name="second", version=0))
        headers = {"Authorization": f"Bearer {TOKEN}", api.LEARNER_HEADER: "first"}
        async with httpx.AsyncClient(base_url=url, headers=headers) as http:
            while (reply := await http.get(api.BATCH, params={"policy_version": 1})).status_code in (200, 204):
                await asyncio.sleep(0.01)
        assert reply.status_code == 409
        await second
        await run


async def test_a_learner_that_dies_while_its_weights_travel_is_waited_for(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    class Broken(YesAndNo):
        """Its connection to the learner breaks when that dies, as with gloo and NCCL."""

        died = asyncio.Event()

        async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
            if ref.policy_version == 2 and not self.died.is_set():
                learner.cancel()
                self.died.set()
                raise WeightSyncError("the learner is gone")
            return await super().update_weights(ref)

    engine = Broken(tokenizer, latency_s=0.003)
    async with running(make_config(tmp_path), tokenizer, engine=engine) as (run, url, _):
        learner = asyncio.create_task(obedient_learner(url, [], name="first"))
        await asyncio.wait({learner})
        await obedient_learner(url, [], name="second", version=1)
        assert (await run).num_steps == 4


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_a_run_that_was_cut_off_goes_on_in_a_new_process(
    tmp_path: Path, tokenizer: TurnTokenizer, max_lag: int
) -> None:
    config = make_config(tmp_path, steps=6, eval_every=3, max_lag=max_lag)
    first: list[Batch] = []
    second: list[Batch] = []
    async with running(config, tokenizer) as (_, url, _):
        await obedient_learner(url, first, name="first", dies_at=4)
    folder = RunFolder.open(tmp_path / "t")
    with closing(Journal(folder.journal)) as journal:
        recorded = journal.last_step()  # a line of a later step is written again
    before = [line for line in read(folder.metrics) if line.step <= recorded]
    async with running(config, tokenizer, run=folder) as (run, url, _):
        await obedient_learner(url, second, name="second", version=2)
        summary = await run
    assert recorded >= 3 and read(folder.metrics)[: len(before)] == before
    assert second[:3] == first[2:]
    assert (summary.num_steps, summary.before.policy_version, summary.after.policy_version) == (6, 0, 6)
    assert steps_of(folder) == dict.fromkeys(range(1, 7), 2)
    lines = read(folder.metrics)
    assert [line.step for line in lines if line.kind == "step"] == list(range(1, 7))
    assert [line.step for line in lines if line.kind == "eval"] == [0, 3, 6]
    trained = [group for batch in [*first[:2], *second] for group in batch.groups]
    assert len({group.group_id for group in trained}) == len(trained) == 12


async def test_tasks_go_on_where_they_were_and_what_was_in_flight_is_played_again(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    config = make_config(tmp_path, steps=6, eval_every=0, max_lag=0)
    async with running(make_config(tmp_path / "whole", steps=6, eval_every=0, max_lag=0), tokenizer) as (run, url, _):
        whole: list[Batch] = []
        await obedient_learner(url, whole)
        await run
    cut: list[Batch] = []
    async with running(config, tokenizer) as (_, url, _):
        await obedient_learner(url, cut, name="1", dies_at=1)
    for name, version, dies_at in (("2", 1, 4), ("3", 3, 99)):
        del cut[version:]
        async with running(config, tokenizer, run=RunFolder.open(tmp_path / "t")) as (_, url, _):
            await obedient_learner(url, cut, name=name, version=version, dies_at=dies_at)
    assert [[(g.group_id, g.task.id) for g in batch.groups] for batch in cut] == [
        [(g.group_id, g.task.id) for g in batch.groups] for batch in whole
    ]


async def test_a_step_that_only_the_learner_survived_is_written_down(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    config = make_config(tmp_path, steps=4, eval_every=0, max_lag=0)
    seen: list[Batch] = []
    async with running(config, tokenizer) as (_, url, _):
        await obedient_learner(url, seen, dies_at=2)  # it has the batch; say it made the step, and kept it
    folder = RunFolder.open(tmp_path / "t")
    async with running(config, tokenizer, run=folder) as (run, url, _):
        await obedient_learner(url, seen, version=3)
        await run
    assert [line.step for line in read(folder.metrics) if line.kind == "step"] == [1, 2, 3, 4]
    assert folder.trajectory_steps() == [1, 2, 3, 4]
    assert folder.read_trajectories(3) == list(seen[2].groups)
    assert steps_of(folder) == dict.fromkeys(range(1, 5), 2)


@pytest.mark.parametrize("version", [2, 3])
async def test_a_crash_between_the_numbers_and_the_mark_of_a_step_writes_them_once(
    tmp_path: Path, tokenizer: TurnTokenizer, version: int
) -> None:
    config = make_config(tmp_path, steps=4, eval_every=0, max_lag=0)
    async with running(config, tokenizer) as (_, url, _):
        await obedient_learner(url, [], dies_at=3)
    folder = RunFolder.open(tmp_path / "t")
    with closing(Journal(folder.journal)) as journal:
        journal._db.execute("DELETE FROM steps WHERE step = 3")
    async with running(config, tokenizer, run=folder) as (run, url, _):
        await obedient_learner(url, [], version=version)
        await run
    assert [line.step for line in read(folder.metrics) if line.kind == "step"] == [1, 2, 3, 4]
    assert folder.trajectory_steps() == [1, 2, 3, 4]


async def test_batches_that_checkpoints_cover_are_forgotten(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    config = make_config(tmp_path, steps=6, eval_every=0)
    async with running(config, tokenizer) as (_, url, _):
        await obedient_learner(url, [], dies_at=4, resumable_from=2)
    with closing(Journal(tmp_path / "t" / "journal.sqlite")) as journal:
        kept = journal._rows("SELECT DISTINCT step FROM groups WHERE payload IS NOT NULL AND step > 0 ORDER BY step")
        assert [step for (step,) in kept] == [3, 4, 5]
        with pytest.raises(ConfigError, match=r"no longer holds the batch of step 2.*version 1"):
            journal.resume_at(1)
        assert len(journal.resume_at(2).batches) == 3


async def finished_run(tmp_path: Path, tokenizer: TurnTokenizer) -> RunFolder:
    async with running(make_config(tmp_path), tokenizer) as (run, url, _):
        await obedient_learner(url, [])
        await run
    folder = RunFolder.open(tmp_path / "t")
    (folder.checkpoints / "final").mkdir()
    return folder


async def test_a_run_that_is_over_says_so_and_goes_on_with_more_steps(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    folder = await finished_run(tmp_path, tokenizer)
    with pytest.raises(ConfigError, match=r"is over: 4 of 4 steps. To continue, give train.steps=N"):
        reopen(folder.path, [])
    _, config = reopen(folder.path, ["train.steps=5"])
    async with running(config, tokenizer, run=folder) as (run, url, _):
        seen: list[Batch] = []
        await obedient_learner(url, seen, version=4)
        assert (await run).num_steps == 5
    assert [batch.policy_version for batch in seen] == [4]
    assert reopen(folder.path, ["train.steps=6"])[1].train.steps == 6


@pytest.mark.parametrize("override", ["seed=1", "rollout.max_lag=3", "learner.lr=1", "env.target=a:B"])
async def test_what_must_stay_cannot_change(tmp_path: Path, override: str) -> None:
    config = make_config(tmp_path)
    run = RunFolder.create(config.out_dir, config.name, config=config)
    with pytest.raises(ConfigError, match=f"{override.partition('=')[0]} cannot change in a run that is resumed"):
        reopen(run.path, [override])


def test_a_run_that_never_began_and_a_folder_that_is_none(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = RunFolder.create(config.out_dir, config.name, config=config)
    with pytest.raises(ConfigError, match=r"no journal\.sqlite: the run never began"):
        reopen(run.path, [])
    with pytest.raises(ConfigError, match=r"there is no run .*nothing"):
        reopen(tmp_path / "nothing", [])


def test_two_processes_do_not_train_one_run(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = RunFolder.create(config.out_dir, config.name, config=config)
    with run.locked(), pytest.raises(ConfigError, match=r"is being trained by process \d+"), run.locked():
        pass
    with run.locked():
        pass
