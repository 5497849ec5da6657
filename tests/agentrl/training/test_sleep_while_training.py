"""Whole runs in which the engine releases its memory while the learner steps, on a double of a vLLM server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl.config import Config
from agentrl.engine.base import WeightUpdate
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.report.metrics import read
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training.learner_session import LearnerSession
from agentrl.types import Batch, Completion, Sampling, StepOutput, WeightsRef
from tests.agentrl.engine.vllm_double import vllm_double
from tests.agentrl.training.test_troubleshooting_engine import provable
from tests.agentrl.training.whole_run import YesAndNo, make_config, obedient_learner, orchestrating, run_with


class Sleeping(VLLMEngine):
    """Tells its script which version it has."""

    script: YesAndNo

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        update = await super().update_weights(provable(ref))
        self.script.policy_version = ref.policy_version
        return update


def config_for(tmp_path: Path) -> Config:
    config = make_config(tmp_path, steps=3, eval_every=2, max_lag=0)
    return config.model_copy(update={"engine": config.engine.model_copy(update={"sleep_while_training": True})})


async def test_the_learner_has_the_gpu_to_itself_from_the_batch_to_the_new_weights(
    tmp_path: Path, tokenizer: TurnTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = YesAndNo(tokenizer)
    stepped: list[set[str]] = []
    async with vllm_double(script) as double, Sleeping(double.url) as engine:
        engine.script = script
        train = LearnerSession.train

        async def watched(session: LearnerSession, batch: Batch, *, within_s: float) -> StepOutput:
            stepped.append(set(double.asleep))
            return await train(session, batch, within_s=within_s)

        monkeypatch.setattr(LearnerSession, "train", watched)
        summary, seen = await run_with(config_for(tmp_path), engine, tokenizer)
        assert summary.num_steps == len(seen) == 3
        assert stepped == [{"weights", "kv_cache"}] * 3
        changes = [call for call in double.calls if call in ("sleep", "wake_up weights", "wake_up kv_cache")]
        assert changes == ["sleep", "wake_up weights", "wake_up kv_cache"] * 3
        asleep = False
        for call in double.calls:
            asleep = call == "sleep" or (asleep and call != "wake_up kv_cache")
            assert not (asleep and call == "inference/v1/generate")
        assert double.lies == []


class HalfSlow(YesAndNo):
    """Takes its time for every second group."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        group_id = int((session_id or "").split("-")[1])
        await asyncio.sleep(0.15 if group_id % 2 else 0.005)
        return await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)


async def test_unfinished_groups_pause_while_the_learner_steps_and_are_trained_later(
    tmp_path: Path, tokenizer: TurnTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = HalfSlow(tokenizer)
    config = make_config(tmp_path, steps=6, eval_every=0, max_lag=0, oversample=2, on_stale="finish")
    paused: list[bool] = []
    async with vllm_double(script) as double, Sleeping(double.url) as engine:
        engine.script = script
        train = LearnerSession.train

        async def watched(session: LearnerSession, batch: Batch, *, within_s: float) -> StepOutput:
            paused.append(await engine.control.is_paused())
            return await train(session, batch, within_s=within_s)

        monkeypatch.setattr(LearnerSession, "train", watched)
        summary, seen = await run_with(config, engine, tokenizer)
        assert summary.num_steps == len(seen) == 6 and paused == [True] * 6
        ids = [group.group_id for batch in seen for group in batch.groups]
        assert len(ids) == len(set(ids)) == 12
        assert any(batch.policy_version > group.policy_version for batch in seen for group in batch.groups)
        assert ids != sorted(ids), "no slow group was overtaken"
        assert double.lies == []
    last = [line for line in read(tmp_path / "t" / "metrics.jsonl") if line.kind == "step"][-1].values
    assert (last["ledger/trained"], last["ledger/dropped_stale"]) == (12, 0)


async def test_a_learner_that_dies_while_the_engine_sleeps_wakes_it_when_it_is_back(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    script = YesAndNo(tokenizer)
    async with vllm_double(script) as double, Sleeping(double.url) as engine:
        engine.script = script
        async with orchestrating(config_for(tmp_path), engine, tokenizer) as (orchestrator, url):
            run = asyncio.create_task(orchestrator.run())
            await obedient_learner(url, [], name="first", dies_at=1)
            assert double.asleep == {"weights", "kv_cache"}
            await obedient_learner(url, [], name="second", version=0)
            assert (await run).num_steps == 3
        changes = [call for call in double.calls if call in ("sleep", "wake_up kv_cache")]
        assert changes == ["sleep", "wake_up kv_cache"] * 5  # two steps of the first learner, three of the second
        assert double.asleep == set() and double.lies == []


async def test_tail_batching_trains_unfinished_tasks_together_also_after_the_learner_died(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    script = HalfSlow(tokenizer)
    config = make_config(tmp_path, steps=5, eval_every=0, max_lag=0, oversample=2, partial="restart")
    first: list[Batch] = []
    second: list[Batch] = []
    async with vllm_double(script) as double, Sleeping(double.url) as engine:
        engine.script = script
        async with orchestrating(config, engine, tokenizer) as (orchestrator, url):
            run = asyncio.create_task(orchestrator.run())
            await obedient_learner(url, first, name="first", dies_at=2)
            await obedient_learner(url, second, name="second", version=1)
            assert (await run).num_steps == 5
        assert double.lies == []
    seen = [first[0], *second]
    ids = [[group.group_id for group in batch.groups] for batch in seen]
    assert [batch.groups for batch in second[:2]] == [batch.groups for batch in first[1:]], "other batches"
    assert ids[:2] == [[0, 2], [4, 5]], "the slow groups 1 and 3 were not played again together"
    assert len({group_id for batch in ids for group_id in batch}) == 10
    assert {batch.max_lag for batch in seen} == {0}
    assert all(batch.policy_version == group.policy_version for batch in seen for group in batch.groups)
    last = [line for line in read(tmp_path / "t" / "metrics.jsonl") if line.kind == "step"][-1].values
    assert (last["ledger/trained"], last["ledger/dropped_stale"], last["ledger/failed"]) == (10, 0, 0)
    assert last["ledger/restarted"] >= 4
