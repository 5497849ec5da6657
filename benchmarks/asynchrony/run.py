"""One training run of an arm, as one record: what `agentrl train` runs, with the waits' clock and the shared engine.

Independent of which cells are measured and of what is made of the records.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from agentrl.chat.runners import TokenRunners
from agentrl.config import Config
from agentrl.data.source import TaskSource
from agentrl.engine.base import Engine, TrainableEngine, WeightUpdate
from agentrl.engine.metered import MeteredEngine
from agentrl.env import load_env_class, opened
from agentrl.errors import raise_first
from agentrl.report.evaluation import HeldOutSet
from agentrl.report.metrics import MetricsLog
from agentrl.report.observer import Observer, StepReport
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import settings_of
from agentrl.run_folder import EpisodeKind, RunFolder
from agentrl.supervision.child import Child
from agentrl.supervision.secrets import Secrets
from agentrl.supervision.serving import serving
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.training import launch
from agentrl.training.learner_api import create_app
from agentrl.training.orchestrator import Orchestrator, RolloutParts
from agentrl.types import Task, TrajectoryGroup, WeightsRef
from benchmarks import reporting
from benchmarks.asynchrony.arms import ARMS, Arm, Value
from benchmarks.asynchrony.drained import Drained
from benchmarks.asynchrony.stage import EVERY_CORE, Stage, configured, core_seconds, machine_core_seconds, pin
from benchmarks.asynchrony.waits import Clock, WaitingModMath, median_for

LEARNER_EXIT_S = 10.0
IDLE_WAITS = {
    ("training loop", "rollouts"),
    ("learner", "training loop"),
    ("rollouts", "episodes"),
    ("rollouts", "training loop"),
}
"""(who, on) of the waits of a run in which only tool calls are under way."""
STANDSTILL_S = 0.1
"""Longer than any pause of a learner that computes, and than the kernel's unit of processor time (0.01 s)."""
NEEDED_WAITS = {("training loop", "rollouts"), ("learner", "training loop")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A run to be made: the key of its record."""

    arm: str
    sigma: float
    mean_wait_s: float
    seed: int
    num_steps: int
    kind: str = "score"
    """`score`: its weights are measured afterwards; `speed`: only its seconds count."""
    real_sleep: bool = False

    def settings(self, calls: float) -> dict[str, Value]:
        """Keys of the config. `calls`: of the tool, by an episode, on average."""
        median_s = median_for(self.mean_wait_s, calls=calls, sigma=self.sigma)
        kwargs = f"{{sigma: {self.sigma:g}, median_s: {median_s:.6g}}}"
        return {
            **ARMS[self.arm].settings,
            "env.kwargs": kwargs,
            "seed": self.seed,
            "train.steps": self.num_steps,
            "train.max_minutes": "null",
        }


class KeptWeights(MeteredEngine):
    """The shared engine, measured, which keeps a copy of every `every`-th version."""

    def __init__(self, engine: TrainableEngine, folder: Path, *, every: int) -> None:
        super().__init__(engine)
        self._folder, self._every = folder, every
        self.kept: dict[int, WeightsRef] = {}
        """By version."""

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        """See TrainableEngine."""
        version, path = ref.policy_version, ref.path
        if self._every and version % self._every == 0 and path is not None:
            target = self._folder / str(version)
            await asyncio.to_thread(shutil.copytree, path, target, dirs_exist_ok=True)
            self.kept[version] = replace(ref, update_info={**ref.update_info, "path": str(target)})
        return await super().update_weights(ref)


class _LearnerMeter:
    """Processor time of the learner, which may end before it is asked for the last time."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self._core_s = 0.0
        self._stood_since, self._stood_at_s = 0.0, -1.0

    def core_s(self) -> float:
        """Core seconds so far; of the last reading, once the learner has ended."""
        if self.pid is not None:
            with suppress(psutil.NoSuchProcess):
                self._core_s = core_seconds(self.pid)
        return self._core_s

    def stands_still(self) -> bool:
        """Ask again and again: True once STANDSTILL_S have passed without processor time."""
        if self.pid is None:
            return False
        now, core_s = time.monotonic(), self.core_s()
        if core_s != self._stood_at_s:
            self._stood_since, self._stood_at_s = now, core_s
        return now - self._stood_since > STANDSTILL_S


class Timeline(Observer):
    """Notes every step on the run's clock."""

    def __init__(self, clock: Clock, engine: KeptWeights, learner: _LearnerMeter) -> None:
        self._clock, self._engine, self._learner = clock, engine, learner
        self._began: tuple[float, float] | None = None
        self.steps: list[dict[str, Any]] = []

    def begin(self) -> None:
        """The first training group is asked for."""
        self._began = self._began or (self._clock.now(), self._clock.skipped_s)

    def step(self, report: StepReport) -> None:
        """See Observer."""
        assert self._began is not None
        began_s, skipped_s = self._began
        at_s = self._clock.now() - began_s
        self._learner.core_s()
        values = {name: round(float(report.metrics.get(key, 0.0)), 5) for name, key in _NOTED.items()}
        self.steps.append(
            {
                "version": report.step,
                "at_s": round(at_s, 4),
                "real_s": round(at_s - (self._clock.skipped_s - skipped_s), 4),
                **values,
                "generated": self._engine.num_tokens,
                "engine_busy_s": round(self._engine.busy.seconds, 4),
            }
        )


_NOTED: Mapping[str, str] = {
    "learner_step_s": "learner/step_s",
    "publish_s": "learner/publish_s",
    "publish_beside_s": "learner/publish_beside_s",
    "wait_batch_s": "wait/learner_for_batch_s",
    "reward": "rollout/reward_mean",
    "lag_mean": "learner/lag_mean",
    "lag_max": "learner/lag_max",
    "groups_trained": "ledger/trained",
    "groups_equal": "ledger/dropped_zero_variance",
    "groups_stale": "ledger/dropped_stale",
    "groups_issued": "ledger/issued",
    "stale_tokens_mean": "buffer/dropped_stale_tokens_mean",
    "ess": "learner/ess_ratio",
    "skipped_steps": "learner/skipped_steps",
}
"""Our name for what a step's metrics have under the product's name. Ledger entries count from the run's beginning."""


class _Players:
    """Training groups on the clock, and held-out ones without waits."""

    def __init__(
        self, training: GroupPlayer[Engine], held_out: GroupPlayer[Engine], *, timeline: Timeline, group_size: int
    ) -> None:
        self._training, self._held_out = training, held_out
        self._timeline, self._group_size = timeline, group_size

    async def play_group(self, engine: Engine, group_id: int, task: Task, /, *, kind: EpisodeKind) -> TrajectoryGroup:
        """See PlayGroup. From here to its end a group's episodes compute unless they wait."""
        if kind != "train":
            return await self._held_out.play_group(engine, group_id, task, kind=kind)
        self._timeline.begin()
        with WaitingModMath.computing(task, self._group_size):
            return await self._training.play_group(engine, group_id, task, kind=kind)


async def measured(stage: Stage, cell: Cell, *, config_path: Path, calls: float, keep_every: int) -> dict[str, Any]:
    """Make the run. Returns its record, and leaves the weights that were kept in `record["kept"]` for scores.py."""
    arm = ARMS[cell.arm]
    settings = cell.settings(calls)
    config = configured(config_path, stage.config.model.path, settings)
    header, load = reporting.header(cell.arm, {}).split("\n", 2)[2], os.getloadavg()[0]
    with TemporaryDirectory(prefix="asynchrony-run-") as place:
        run = RunFolder.create(place, cell.arm, config=config)
        try:
            made = await _Run(stage, arm, config, run, cell=cell, keep_every=keep_every).make()
        finally:
            pin([os.getpid()], EVERY_CORE)  # a split arm leaves one core to this process, and to what it starts next
        trained = [group for step in run.trajectory_steps() for group in run.read_trajectories(step)]
    return {
        **asdict(cell),
        "header": header,
        "load": round(load, 2),
        "settings": settings,
        **made,
        **_lengths(trained),
    }


def _lengths(trained: Sequence[TrajectoryGroup]) -> dict[str, Any]:
    """What was trained, compared with what was played."""
    waited_s = WaitingModMath.waited_s
    played = [seconds for per_task in waited_s.values() for seconds in per_task]
    tokens = [one.num_action_tokens for group in trained for one in group.trajectories]
    trained_s = [seconds for group in trained for seconds in waited_s[group.task.id]]
    return {
        "finished_waits_s": round(statistics.fmean(played), 4),
        "trained_waits_s": round(statistics.fmean(trained_s), 4),
        "trained_tokens_mean": round(statistics.fmean(tokens), 3),
        "trained_tokens": sum(tokens),
        "trained_groups": len(trained),
        "trained_equal": sum(len(set(group.episode_rewards)) == 1 for group in trained),
        "finished_episodes": len(played),
        "retries": sum(one.info.get("retries", 0.0) for group in trained for one in group.trajectories),
    }


class _Run:
    def __init__(self, stage: Stage, arm: Arm, config: Config, run: RunFolder, *, cell: Cell, keep_every: int) -> None:
        self._stage, self._arm, self._config, self._run = stage, arm, config, run
        self._graph = WaitGraph()
        self._clock = Clock(is_idle=self._is_idle, skips=not cell.real_sleep)
        self._engine = KeptWeights(stage.engine, stage.weights / run.path.name, every=keep_every)
        self._learner = _LearnerMeter()
        self._timeline = Timeline(self._clock, self._engine, self._learner)
        self._drained: Drained | None = None

    def _is_idle(self) -> bool:
        """Whether only tool calls are under way."""
        if self._drained is not None and self._drained.is_draining:
            return self._learner.stands_still()  # it computes its next step, or waits for the weights to arrive
        waits = {(wait.who, wait.on) for wait in self._graph.snapshot().waits if wait.count}
        return NEEDED_WAITS <= waits <= IDLE_WAITS

    async def make(self) -> dict[str, Any]:
        WaitingModMath.begin_run(self._clock)
        config = self._config
        env_class = load_env_class(config.env.target, config.env.kwargs)
        shutil.rmtree(self._stage.weights / self._run.path.name, ignore_errors=True)
        async with opened(env_class, sandbox=self._stage.sandbox) as make_env:
            training = GroupPlayer(make_env, settings_of(config), TokenRunners(self._stage.tokenizer))
            players = _Players(
                training,
                self._stage.held_out_player,
                timeline=self._timeline,
                group_size=config.rollout.num_plays,
            )
            if self._arm.is_drained:
                self._drained = Drained(self._engine, players.play_group)
            with MetricsLog(self._run, sinks=()) as metrics:
                orchestrator = Orchestrator(
                    config,
                    engine=self._drained or self._engine,
                    rollout_parts=RolloutParts(
                        play_group=(self._drained or players).play_group,
                        source=TaskSource(env_class, config.env, seed=config.seed),
                        held_out=[
                            HeldOutSet(
                                tasks=self._stage.held_out[:1],
                                num_plays=config.eval.samples_per_task,
                                play_group=(self._drained or players).play_group,
                            )
                        ],
                    ),
                    run=self._run,
                    metrics=metrics,
                    observer=self._timeline,
                    wait_graph=self._graph,
                )
                return await self._with_learner(orchestrator)

    async def _with_learner(self, orchestrator: Orchestrator) -> dict[str, Any]:
        secret = Secrets.from_environment({}).run
        async with serving(create_app(orchestrator.sessions, token=secret), host="127.0.0.1", port=0) as url:
            with launch.weights_folder(self._run.path) as weights_dir:
                async with (
                    launch.learner_process(
                        self._config,
                        config_path=self._run.config,
                        orchestrator_url=url,
                        weights_dir=weights_dir,
                        run_dir=self._run.path,
                        token=secret,
                        may_end=lambda: orchestrator.sessions.is_done,
                    ) as learner,
                    launch.watching(learner),
                ):
                    return await self._counted(orchestrator, learner)

    async def _counted(self, orchestrator: Orchestrator, learner: Child) -> dict[str, Any]:
        try:
            async with asyncio.TaskGroup() as tasks:
                meter = tasks.create_task(self._after_start(orchestrator, learner))
                await orchestrator.run()
        except BaseExceptionGroup as errors:
            raise_first(errors)
        before = meter.result()
        after = self._spent()
        spent = {name: round(after[name] - before[name], 3) for name in after}
        with suppress(TimeoutError):
            async with asyncio.timeout(LEARNER_EXIT_S):
                await learner.wait()
        return {
            "steps": self._timeline.steps,
            "core_s": spent,
            "skipped_s": round(self._clock.skipped_s, 3),
            "kept": self._engine.kept,
        }

    async def _after_start(self, orchestrator: Orchestrator, learner: Child) -> dict[str, float]:
        """Pin the parts, and read the meters, when the learner has started."""
        await orchestrator.learner_connected()
        own, part = os.getpid(), learner.process.pid
        self._learner.pid = part
        if self._arm.is_split:
            pin([own], {0})
            pin([part], {1})
        else:
            pin([own], EVERY_CORE)
        return self._spent()

    def _spent(self) -> dict[str, float]:
        """Core seconds so far."""
        own = core_seconds(os.getpid())
        engine, learning = core_seconds(self._stage.engine_part.process.pid), self._learner.core_s()
        return {
            "engine": engine,
            "learner": learning,
            "rest": own - engine - learning,
            "others": machine_core_seconds() - own,
        }
