"""Whole runs over HTTP: an environment, a scripted engine, a learner that follows the API and trains nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from agentrl.chat.runners import TokenRunners
from agentrl.config import Config, parse
from agentrl.data.source import TaskSource, held_out_tasks
from agentrl.engine.base import TrainableEngine
from agentrl.env import Action, Env, Episode, StepResult
from agentrl.env.canary import Canaries
from agentrl.report.metrics import MetricsLog
from agentrl.report.observer import Observer, StepReport, Summary
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import settings_of
from agentrl.run_folder import RunFolder
from agentrl.supervision.serving import serving
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training import learner_api as api
from agentrl.training.learner_api import create_app
from agentrl.training.orchestrator import Orchestrator, RolloutParts
from agentrl.types import Batch, Message, Probe, StepOutput, Task, TransferInit, WeightsRef, user

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


class Quiet(Observer):
    """An observer that only remembers."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.made_before: list[int] = []
        self.resumptions: list[tuple[int, int]] = []

    def step(self, report: StepReport) -> None:
        (self.made_before if report.made_before else self.steps).append(report.step)

    def resumed(self, version: int, made_before: int) -> None:
        self.resumptions.append((version, made_before))


class YesAndNo(ScriptedEngine):
    """Says yes and no in turn, so that every group has both."""

    def __init__(self, tokenizer: TurnTokenizer, **options: Any) -> None:
        super().__init__(tokenizer=tokenizer, script=self._alternate, **options)
        self._count = 0

    def _alternate(self, prompt: str) -> str:
        self._count += 1
        return "yes" if self._count % 2 else "no"


def make_config(tmp_path: Path, *, steps: int = 4, eval_every: int = 2, **rollout: Any) -> Config:
    """Steps of two groups of four."""
    return parse(
        {
            "name": "t",
            "out_dir": str(tmp_path),
            "env": {"target": "unused:Unused"},
            "model": {"path": "unused"},
            "rollout": {"groups_per_step": 2, "group_size": 4, "max_lag": 1, "max_retries": 0, **rollout},
            "learner": {"start_timeout_s": 20, "step_timeout_s": 20},
            "train": {"steps": steps, "stall_timeout_s": 20},
            "eval": {"num_tasks": 2, "samples_per_task": 2, "every": eval_every},
        },
        source="test",
    )


@asynccontextmanager
async def orchestrating(
    config: Config,
    engine: TrainableEngine,
    tokenizer: TurnTokenizer,
    *,
    env_class: type[Env] = SayYes,
    make_env: Callable[[], Env] | None = None,
    canaries: Canaries | None = None,
    run: RunFolder | None = None,
    wait_graph: WaitGraph | None = None,
) -> AsyncIterator[tuple[Orchestrator, str]]:
    """An orchestrator whose learner's side is served at the URL. `make_env`: default `env_class`; `run`: goes on."""
    run = run or RunFolder.create(config.out_dir, config.name, config=config)
    player = GroupPlayer(make_env or env_class, settings_of(config), TokenRunners(tokenizer))
    with MetricsLog(run) as metrics:
        orchestrator = Orchestrator(
            config,
            engine=engine,
            rollout_parts=RolloutParts(
                play_group=player.play_group,
                source=TaskSource(env_class, config.env, seed=0),
                held_out=held_out_tasks(env_class, config.env, num_tasks=2),
                canaries=canaries,
            ),
            run=run,
            metrics=metrics,
            observer=Quiet(),
            wait_graph=wait_graph,
        )
        async with serving(create_app(orchestrator.sessions, token=TOKEN), host="127.0.0.1", port=0) as url:
            yield orchestrator, url


async def obedient_learner(
    url: str,
    seen: list[Batch],
    *,
    repeat: bool = False,
    ess_ratio: float | None = None,
    name: str = "",
    version: int = 0,
    dies_at: int | None = None,
    resumable_from: int | None = None,
) -> None:
    """Follows the learner API and trains nothing: from `version` to the end, or up to the batch of `dies_at`."""
    headers = {"Authorization": f"Bearer {TOKEN}", api.LEARNER_HEADER: name}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
        while True:
            probe = Probe(token_ids=(1, 2), logprobs=(-1.0,))
            ref = WeightsRef(policy_version=version, num_bytes=0, update_info={}, checksum="", probe=probe)
            for _ in range(2 if repeat else 1):
                (await http.post(api.WEIGHTS, content=api.encode(ref))).raise_for_status()
            while (reply := await http.get(api.BATCH, params={"policy_version": version})).status_code in (
                204,
                205,
            ):
                if reply.status_code == 205:
                    (await http.post(api.TRANSFER, content=api.encode(TransferInit(init_info={})))).raise_for_status()
                    (await http.post(api.WEIGHTS, content=api.encode(ref))).raise_for_status()
            if reply.status_code == 410:
                (await http.post(api.FINISHED)).raise_for_status()
                return
            if repeat:
                again = await http.get(api.BATCH, params={"policy_version": version})
                assert again.content == reply.content
            seen.append(api.decode(reply.content, Batch))
            if version == dies_at:
                return
            version += 1
            output = StepOutput(
                policy_version=version,
                metrics={"learner/wait_batch_s": 0.0},
                ess_ratio=ess_ratio,
                resumable_from=resumable_from,
            )
            for _ in range(2 if repeat else 1):
                (await http.post(api.STEP, content=api.encode(output))).raise_for_status()


async def run_with(
    config: Config,
    engine: TrainableEngine,
    tokenizer: TurnTokenizer,
    *,
    parts: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Summary, list[Batch]]:
    """A whole run, and the batches its learner saw. `parts` go to `orchestrating`, `options` to the learner."""
    seen: list[Batch] = []
    async with orchestrating(config, engine, tokenizer, **(parts or {})) as (orchestrator, url):
        learner = asyncio.create_task(obedient_learner(url, seen, **options))
        try:
            async with asyncio.timeout(120):
                summary = await orchestrator.run()
                await learner
        finally:
            learner.cancel()
    return summary, seen
