"""The training loop over HTTP with a learner that obeys the API, and engines that do and do not work."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from agentrl.config import parse
from agentrl.engine.base import WeightUpdate
from agentrl.errors import EngineError, ErrorRateExceeded, NoLearningSignal, WeightSyncError
from agentrl.report.metrics import read
from agentrl.run_folder import RunFolder
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training import learner_api as api
from agentrl.types import Batch, Probe, StepOutput, TransferInit, WeightsRef
from tests.agentrl.training.whole_run import TOKEN, YesAndNo, make_config, orchestrating, run_with


@pytest.mark.parametrize("max_lag", [0, 1, 3])
async def test_every_batch_is_full_and_fresh_and_the_ledger_is_logged(
    tmp_path: Path, tokenizer: TurnTokenizer, max_lag: int
) -> None:
    config = make_config(tmp_path, max_lag=max_lag)
    summary, seen = await run_with(config, YesAndNo(tokenizer, latency_s=0.005), tokenizer)
    assert [batch.policy_version for batch in seen] == [0, 1, 2, 3]
    assert all(len(batch.groups) == 2 for batch in seen)
    assert all(batch.policy_version - group.policy_version <= max_lag for batch in seen for group in batch.groups)
    assert summary.num_steps == 4
    lines = read(tmp_path / "t" / "metrics.jsonl")
    assert [line.step for line in lines if line.kind == "step"] == [1, 2, 3, 4]
    assert [line.step for line in lines if line.kind == "eval"] == [0, 2, 4]
    steps = [line.values for line in lines if line.kind == "step"]
    assert steps[-1]["ledger/trained"] == 8
    finished = [step for step in steps if "rollout/useful_groups" in step]  # a step may train only older groups
    assert finished and all(step["rollout/useful_groups"] == step["rollout/useful_tokens"] == 1 for step in finished)
    assert summary.signal.useful_share == 1
    assert summary.signal.groups >= 8


async def test_no_group_is_trained_twice(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    _, seen = await run_with(make_config(tmp_path), YesAndNo(tokenizer), tokenizer, repeat=True)
    ids = [group.group_id for batch in seen for group in batch.groups]
    assert len(ids) == len(set(ids)) == 8


@pytest.mark.parametrize(("ess_ratio", "lags"), [(0.1, [2, 1, 1, 0]), (0.9, [2, 2, 2, 2])])
async def test_low_ess_makes_admission_work_with_less_lag(
    tmp_path: Path, tokenizer: TurnTokenizer, ess_ratio: float, lags: list[float]
) -> None:
    settings = make_config(tmp_path, max_lag=2).model_dump()
    settings["algorithm"] |= {"ess_floor": 0.3, "ess_floor_steps": 2}
    await run_with(parse(settings, source="test"), YesAndNo(tokenizer), tokenizer, ess_ratio=ess_ratio)
    steps = [line for line in read(tmp_path / "t" / "metrics.jsonl") if line.kind == "step"]
    assert [step.values["buffer/admission_lag"] for step in steps] == lags


async def test_wrong_weights_end_the_run_as_themselves(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    class Stale(YesAndNo):
        async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
            raise WeightSyncError("the engine holds other weights")

    with pytest.raises(WeightSyncError, match="other weights"):
        await run_with(make_config(tmp_path), Stale(tokenizer), tokenizer)


async def test_a_restarted_engine_gets_the_present_weights_from_the_learner_again(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    class Restarted(YesAndNo):
        updates: ClassVar[list[int]] = []
        joined = 0

        @property
        def wants_weights(self) -> bool:
            return self.updates == [0, 1, 2]

        async def init_transfer(self, init: TransferInit) -> None:
            self.joined += 1

        async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
            self.updates.append(ref.policy_version)
            return await super().update_weights(ref)

    engine = Restarted(tokenizer)
    summary, _ = await run_with(make_config(tmp_path), engine, tokenizer)
    assert engine.updates == [0, 1, 2, 2, 3, 4]
    assert engine.joined == 1
    assert summary.num_steps == 4


async def test_an_engine_that_fails_in_mid_run_trips_the_breaker(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    class Dying(YesAndNo):
        async def generate(
            self, token_ids: Any, sampling: Any, *, request_id: str, session_id: str | None = None
        ) -> Any:
            if self.policy_version >= 1 and request_id.startswith("train"):
                raise EngineError("connection refused")
            return await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)

    with pytest.raises(ErrorRateExceeded, match="connection refused"):
        await run_with(make_config(tmp_path), Dying(tokenizer), tokenizer)


async def test_a_task_without_signal_ends_with_a_reason(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    with pytest.raises(NoLearningSignal, match=r"100 % by none \(mean reward 0.00\)"):
        await run_with(make_config(tmp_path), ScriptedEngine(tokenizer=tokenizer, script=["no"]), tokenizer)


async def test_groups_of_equal_rewards_are_trained_where_they_are_kept(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    settings = make_config(tmp_path).model_dump()
    settings["algorithm"] |= {"keep_equal_rewards": True}
    engine = ScriptedEngine(tokenizer=tokenizer, script=["no"])
    summary, seen = await run_with(parse(settings, source="test"), engine, tokenizer)
    assert summary.num_steps == 4
    assert all(set(group.rewards_G) == {0.0} for batch in seen for group in batch.groups)


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_the_minutes_hold_while_a_step_waits_and_after_a_resume(
    tmp_path: Path, tokenizer: TurnTokenizer, max_lag: int
) -> None:
    """Under the weights of the first step no group ever finishes."""

    class Endless(YesAndNo):
        async def generate(
            self, token_ids: Any, sampling: Any, *, request_id: str, session_id: str | None = None
        ) -> Any:
            if self.policy_version >= 1 and request_id.startswith("train"):
                await asyncio.Event().wait()
            return await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)

    settings = make_config(tmp_path, steps=9, eval_every=0, max_lag=max_lag).model_dump()
    settings["train"]["max_minutes"] = 0.03
    config = parse(settings, source="test")
    run = RunFolder.create(config.out_dir, config.name, config=config)
    before, seen = await run_with(config, Endless(tokenizer), tokenizer, parts={"run": run})
    assert before.note.startswith("The 0.03 minutes of train.max_minutes were used up")
    assert before.num_steps == len(seen) == before.after.policy_version < 9
    parts = {"run": RunFolder(path=run.path)}
    again, seen = await run_with(config, Endless(tokenizer), tokenizer, parts=parts, version=before.num_steps)
    assert again.note == "The 0.03 minutes of train.max_minutes were used up"
    assert (again.num_steps, seen) == (before.num_steps, [])


async def test_a_wrong_token_gets_nothing(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    async with (
        orchestrating(make_config(tmp_path), YesAndNo(tokenizer), tokenizer) as (_, url),
        httpx.AsyncClient() as http,
    ):
        reply = await http.get(url + api.BATCH, params={"policy_version": 0}, headers={"Authorization": "Bearer x"})
        assert reply.status_code == 401


async def test_garbage_is_refused_and_named(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        orchestrating(make_config(tmp_path), YesAndNo(tokenizer), tokenizer) as (_, url),
        httpx.AsyncClient() as http,
    ):
        reply = await http.post(url + api.STEP, content=b"\x80", headers=headers)
        assert reply.status_code == 422
        assert "policy_version" in reply.text


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_with_lag_the_learner_has_its_next_batch_before_its_weights_are_published(
    tmp_path: Path, tokenizer: TurnTokenizer, max_lag: int
) -> None:
    """Without lag it waits for them. Nothing else is different: every step is made and recorded once."""
    config = make_config(tmp_path, steps=3, eval_every=0, max_lag=max_lag)
    seen: list[Batch] = []
    async with orchestrating(config, YesAndNo(tokenizer), tokenizer) as (orchestrator, url):
        learner = asyncio.create_task(_publishes_late(url, seen, is_given_early=max_lag > 0))
        async with asyncio.timeout(120):
            summary = await orchestrator.run()
            await learner
    assert summary.num_steps == 3 and [batch.policy_version for batch in seen] == [0, 1, 2]
    assert all(batch.policy_version - group.policy_version <= max_lag for batch in seen for group in batch.groups)


async def _publishes_late(url: str, seen: list[Batch], *, is_given_early: bool) -> None:
    """A learner that asks for the next batch, waits for it if it is given early, then publishes."""
    headers = {"Authorization": f"Bearer {TOKEN}", api.LEARNER_HEADER: "late"}

    def ref(version: int) -> bytes:
        probe = Probe(token_ids=(1, 2), logprobs=(-1.0,))
        return api.encode(WeightsRef(policy_version=version, num_bytes=0, update_info={}, checksum="", probe=probe))

    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
        (await http.post(api.WEIGHTS, content=ref(0))).raise_for_status()
        version, batch = 0, await http.get(api.BATCH, params={"policy_version": 0})
        while batch.status_code != 410:
            seen.append(api.decode(batch.content, Batch))
            version += 1
            output = StepOutput(policy_version=version, metrics={"learner/wait_batch_s": 0.0})
            (await http.post(api.STEP, content=api.encode(output))).raise_for_status()
            asking = asyncio.create_task(http.get(api.BATCH, params={"policy_version": version}))
            if version < 3:
                await asyncio.wait({asking}, timeout=None if is_given_early else 0.2)
                assert asking.done() == is_given_early
            (await http.post(api.WEIGHTS, content=ref(version))).raise_for_status()
            while (batch := await asking).status_code == 204:
                asking = asyncio.create_task(http.get(api.BATCH, params={"policy_version": version}))
        (await http.post(api.FINISHED)).raise_for_status()
