"""Whole runs over HTTP: an environment, a scripted engine, a learner that follows the API and trains nothing."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from agentrl.chat.runners import TokenRunners
from agentrl.config import Config, parse
from agentrl.data.source import TaskSource, held_out_tasks
from agentrl.engine.base import Engine, TrainableEngine
from agentrl.env import Action, Env, Episode, StepResult
from agentrl.env.canary import Canaries
from agentrl.report.evaluation import HeldOutSet
from agentrl.report.metrics import MetricsLog
from agentrl.report.observer import Observer, StepReport, Summary
from agentrl.rollouts.group import GroupPlayer, PlayGroup
from agentrl.rollouts.set_envs import load_envs, players_of, tasks_of_set
from agentrl.rollouts.settings import settings_of
from agentrl.run_folder import RunFolder
from agentrl.supervision.serving import serving
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training import learner_api as api
from agentrl.training.evaluations import SpareEngines
from agentrl.training.learner_api import create_app
from agentrl.training.orchestrator import Orchestrator, RolloutParts
from agentrl.types import Batch, Message, Probe, StepOutput, Task, TransferInit, WeightsRef, user
from agentrl.workers.dispatcher import Dispatcher

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
    dispatcher: Dispatcher | None = None,
    held_out: Sequence[HeldOutSet[Engine]] = (),
    spare: TrainableEngine | None = None,
) -> AsyncIterator[tuple[Orchestrator, str]]:
    """An orchestrator whose learner's side is served at the URL. `make_env`: default `env_class`; `run`: goes on;
    `dispatcher`: its workers play; `held_out`: default two tasks of `env_class`; `spare`: only evaluates."""
    run = run or RunFolder.create(config.out_dir, config.name, config=config)
    player = GroupPlayer(make_env or env_class, settings_of(config), TokenRunners(tokenizer))
    play_group = dispatcher.play_group if dispatcher else player.play_group
    held_out = held_out or [_the_only_set(config, env_class, play_group)]
    with MetricsLog(run) as metrics:
        orchestrator = Orchestrator(
            config,
            engine=engine,
            rollout_parts=RolloutParts(
                play_group=play_group,
                source=TaskSource(env_class, config.env, seed=0),
                held_out=held_out,
                spare=SpareEngines(engine=spare, held_out=held_out) if spare else None,
                canaries=canaries,
                measure_with=dispatcher.measure_with if dispatcher else lambda engine: None,
            ),
            run=run,
            metrics=metrics,
            observer=Quiet(),
            wait_graph=wait_graph,
        )
        async with serving(create_app(orchestrator.sessions, token=TOKEN), host="127.0.0.1", port=0) as url:
            yield orchestrator, url


def held_out_sets(
    config: Config, tokenizer: TurnTokenizer, dispatcher: Dispatcher | None = None
) -> list[HeldOutSet[Engine]]:
    """The sets of the config, played here or by the dispatcher's workers."""
    envs = load_envs(config)
    players = players_of(envs, {name: env.env_class for name, env in envs.items()}, TokenRunners(tokenizer))
    plays = {name: envs[name].config.eval.samples_per_task for name in config.eval_sets}
    return [
        HeldOutSet(
            name=name,
            tasks=tasks_of_set(name, envs[name]),
            num_plays=num_plays,
            play_group=dispatcher.of_set(name, num_plays=num_plays) if dispatcher else players[name].play_group,
        )
        for name, num_plays in plays.items()
    ]


def _the_only_set(config: Config, env_class: type[Env], play_group: PlayGroup[Engine]) -> HeldOutSet[Engine]:
    tasks = held_out_tasks(env_class, config.env, num_tasks=2)
    return HeldOutSet(tasks=tasks, num_plays=config.eval.samples_per_task, play_group=play_group)


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
    early: list[Batch] | None = None,
    dies_in_part: bool = False,
    weights_dir: Path | None = None,
) -> None:
    """Follows the learner API and trains nothing: from `version` to the end, or up to the batch of `dies_at`.

    `early` gets every part of a batch that came before the whole of it; `dies_in_part`: at the first of `dies_at`.
    `weights_dir`: has a folder of the present version and of the one before, as a learner's.
    """
    headers = {"Authorization": f"Bearer {TOKEN}", api.LEARNER_HEADER: name}
    parts: list[Batch] = []  # of the batch of `version`, before the last one
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
        while True:
            probe = Probe(token_ids=(1, 2), logprobs=(-1.0,))
            info = _published(weights_dir, version) if weights_dir else {}
            ref = WeightsRef(policy_version=version, num_bytes=0, update_info=info, checksum="", probe=probe)
            for _ in range(2 if repeat else 1):
                (await http.post(api.WEIGHTS, content=api.encode(ref))).raise_for_status()
            while True:
                known = {"policy_version": version, "num_known": sum(len(part.groups) for part in parts)}
                reply = await http.get(api.BATCH, params=known)
                if reply.status_code == 205:
                    (await http.post(api.TRANSFER, content=api.encode(TransferInit(init_info={})))).raise_for_status()
                    (await http.post(api.WEIGHTS, content=api.encode(ref))).raise_for_status()
                elif reply.status_code == 200 and (part := api.decode(reply.content, Batch)).num_missing:
                    parts.append(part)
                    if early is not None:
                        early.append(part)
                    if dies_in_part and version == dies_at:
                        return
                elif reply.status_code != 204:
                    break
            if reply.status_code == 410:
                (await http.post(api.FINISHED)).raise_for_status()
                return
            if repeat:
                again = await http.get(api.BATCH, params=known)
                assert again.content == reply.content
            last = api.decode(reply.content, Batch)
            seen.append(replace(last, groups=tuple(group for part in (*parts, last) for group in part.groups)))
            parts = []
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


def _published(root: Path, version: int) -> dict[str, str]:
    (folder := root / f"v{version}-0").mkdir(parents=True)
    (folder / "model.safetensors").write_text(str(version))
    shutil.rmtree(root / f"v{version - 2}-0", ignore_errors=True)
    return {"path": str(folder)}


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
