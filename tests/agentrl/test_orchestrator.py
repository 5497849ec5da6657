"""The conductor's loop over HTTP with a learner that obeys the wire, and engines that do and do not work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from agentrl import wire
from agentrl.batch_server import create_app, serving
from agentrl.config import Config, parse
from agentrl.engine import TrainableEngine
from agentrl.env import Action, Env, Episode, StepResult
from agentrl.errors import EngineError, ErrorRateExceeded, NoLearningSignal, WeightSyncError
from agentrl.metrics import MetricsLog, read
from agentrl.orchestrator import Orchestrator, Summary
from agentrl.player import Player
from agentrl.renderer import TurnTokenizer
from agentrl.run_folder import RunFolder
from agentrl.source import TaskSource, held_out_tasks
from agentrl.statistics import EvalResult
from agentrl.testing import ScriptedEngine
from agentrl.types import Batch, Message, Probe, StepOutput, Task, TransferInit, WeightsRef, user
from agentrl.weight_keeper import WeightUpdate

TOKEN = "secret"


class SayYes(Env):
    """Rewards saying yes."""

    @classmethod
    def tasks(cls, split: str, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return [Task(id=f"{split}-{i}", prompt="Say yes.", answer="yes") for i in range(4)]

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    async def step(self, action: Action) -> StepResult:
        return StepResult([], 0.0, True, False, {})

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(episode.final_text == "yes")}


class Quiet:
    """An observer that only remembers."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)

    def evaluated(self, result: EvalResult) -> None:
        pass

    def evaluating(self, done: int, total: int) -> None:
        pass


class YesAndNo(ScriptedEngine):
    """Says yes and no in turn, so that every group has both."""

    def __init__(self, tokenizer: TurnTokenizer, **options: Any) -> None:
        super().__init__(tokenizer=tokenizer, script=self._alternate, **options)
        self._count = 0

    def _alternate(self, prompt: str) -> str:
        self._count += 1
        return "yes" if self._count % 2 else "no"


def make_config(tmp_path: Path, **rollout: Any) -> Config:
    return parse(
        {
            "name": "t",
            "out_dir": str(tmp_path),
            "env": {"target": "unused:Unused"},
            "model": {"path": "unused"},
            "rollout": {"groups_per_step": 2, "group_size": 4, "max_lag": 1, "max_retries": 0, **rollout},
            "learner": {"start_timeout_s": 20, "step_timeout_s": 20},
            "train": {"steps": 4, "stall_timeout_s": 20},
            "eval": {"num_tasks": 2, "samples_per_task": 2, "every": 2},
        },
        source="test",
    )


@asynccontextmanager
async def orchestrating(
    config: Config, engine: TrainableEngine, tokenizer: TurnTokenizer
) -> AsyncIterator[tuple[Orchestrator, str]]:
    run = RunFolder.create(config.out_dir, config.name, config=config)
    player = Player(config, make_env=SayYes, tokenizer=tokenizer)
    with MetricsLog(run) as metrics:
        orchestrator = Orchestrator(
            config,
            engine=engine,
            play_group=player.play_group,
            source=TaskSource(SayYes, config.env, seed=0),
            held_out=held_out_tasks(SayYes, config.env, num_tasks=2),
            run=run,
            metrics=metrics,
            observer=Quiet(),
        )
        async with serving(create_app(orchestrator.learner_port, token=TOKEN), host="127.0.0.1", port=0) as url:
            yield orchestrator, url


async def obedient_learner(
    url: str, seen: list[Batch], *, repeat: bool = False, ess_ratio: float | None = None
) -> None:
    """Speaks the wire protocol and trains nothing."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
        version = 0
        while True:
            probe = Probe(token_ids=(1, 2), logprobs=(-1.0,))
            ref = WeightsRef(policy_version=version, num_bytes=0, update_info={}, checksum="", probe=probe)
            for _ in range(2 if repeat else 1):
                (await http.post(wire.WEIGHTS, content=wire.encode(ref))).raise_for_status()
            while (reply := await http.get(wire.BATCH, params={"policy_version": version})).status_code in (204, 205):
                if reply.status_code == 205:
                    (await http.post(wire.TRANSFER, content=wire.encode(TransferInit(init_info={})))).raise_for_status()
                    (await http.post(wire.WEIGHTS, content=wire.encode(ref))).raise_for_status()
            if reply.status_code == 410:
                return
            if repeat:
                again = await http.get(wire.BATCH, params={"policy_version": version})
                assert again.content == reply.content
            seen.append(wire.decode(reply.content, Batch))
            version += 1
            output = StepOutput(policy_version=version, metrics={"learner/wait_batch_s": 0.0}, ess_ratio=ess_ratio)
            for _ in range(2 if repeat else 1):
                (await http.post(wire.STEP, content=wire.encode(output))).raise_for_status()


async def run_with(
    config: Config, engine: TrainableEngine, tokenizer: TurnTokenizer, **options: Any
) -> tuple[Summary, list[Batch]]:
    seen: list[Batch] = []
    async with orchestrating(config, engine, tokenizer) as (orchestrator, url):
        learner = asyncio.create_task(obedient_learner(url, seen, **options))
        try:
            async with asyncio.timeout(60):
                summary = await orchestrator.run()
                await learner
        finally:
            learner.cancel()
    return summary, seen


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> TurnTokenizer:
    return TurnTokenizer.load(str(tiny_model_dir))


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
    last = [line for line in lines if line.kind == "step"][-1].values
    assert last["ledger/trained"] == 8


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
        async def generate(self, token_ids: Any, sampling: Any, *, request_id: str) -> Any:
            if self.policy_version >= 1 and request_id.startswith("train"):
                raise EngineError("connection refused")
            return await super().generate(token_ids, sampling, request_id=request_id)

    with pytest.raises(ErrorRateExceeded, match="connection refused"):
        await run_with(make_config(tmp_path), Dying(tokenizer), tokenizer)


async def test_a_task_without_signal_ends_with_a_reason(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    with pytest.raises(NoLearningSignal, match="no success"):
        await run_with(make_config(tmp_path), ScriptedEngine(tokenizer=tokenizer, script=["no"]), tokenizer)


async def test_a_wrong_token_gets_nothing(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    async with (
        orchestrating(make_config(tmp_path), YesAndNo(tokenizer), tokenizer) as (_, url),
        httpx.AsyncClient() as http,
    ):
        reply = await http.get(url + wire.BATCH, params={"policy_version": 0}, headers={"Authorization": "Bearer x"})
        assert reply.status_code == 401


async def test_garbage_is_refused_and_named(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        orchestrating(make_config(tmp_path), YesAndNo(tokenizer), tokenizer) as (_, url),
        httpx.AsyncClient() as http,
    ):
        reply = await http.post(url + wire.STEP, content=b"\x80", headers=headers)
        assert reply.status_code == 422
        assert "policy_version" in reply.text
