"""One run of the study of the quickstart's task: its own learner at a fixed lag, one engine for all runs.

While the learner of one run computes, the engine plays for another. Independent of which runs there are.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from agentrl.chat.runners import TokenRunners
from agentrl.config import Config
from agentrl.data.source import TaskSource, held_out_tasks
from agentrl.engine import launch_servers
from agentrl.env import Env, load_env_class, opened
from agentrl.errors import LearnerError, raise_first
from agentrl.report.evaluation import evaluate
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import settings_of
from agentrl.supervision.secrets import Secrets
from agentrl.training import launch
from agentrl.training.model_folder import is_model_folder
from agentrl.types import Batch, EpisodeRecord, Probe, Task, TrajectoryGroup, WeightsRef
from benchmarks.remembering_sandbox import RememberingSandbox
from benchmarks.stability_task_rules import TASK_RULES, seen_by_learner
from benchmarks.stability_task_steps import NOTED, VARIANCE, summary

if TYPE_CHECKING:
    from agentrl.engine.base import TrainableEngine
    from trainer.learner import Learner

T = TypeVar("T")
SAMPLED_LATER = 4
"""Of the last `lag` weights, which no step waits for, this many are sampled for the curve."""
VARIANCE_EVERY = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One run.

    Example: `Spec(rule="tis", lag=8, seed=0, lr=1e-3, num_steps=64)`.
    """

    rule: str
    lag: int
    seed: int
    lr: float
    num_steps: int
    reward: str = "0/1"
    """A name of stability_task_rules.REWARDS."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """The parts that all runs share, and what one run has made for the others."""

    config: Config
    env_class: type[Env]
    engine: TrainableEngine
    player: GroupPlayer[TrainableEngine]
    held_out: Sequence[Task]
    folder: Path
    """In memory, for weights."""
    wait_while: Path | None = None
    """Nothing new is played or trained while this file exists."""
    engine_free: asyncio.Lock = field(default_factory=asyncio.Lock)
    learner_free: asyncio.Lock = field(default_factory=asyncio.Lock)
    _held: WeightsRef | None = None
    _tasks: dict[int, tuple[TaskSource, list[Task]]] = field(default_factory=dict)
    _first: dict[tuple[int, int], list[TrajectoryGroup]] = field(default_factory=dict)

    async def quiet(self) -> None:
        """Wait while `wait_while` exists."""
        while self.wait_while is not None and self.wait_while.exists():
            await asyncio.sleep(2.0)

    async def played(self, ref: WeightsRef, seed: int, step: int) -> list[TrajectoryGroup]:
        """The groups of a seed's step, by these weights. What version 0 plays is the same for all runs of a seed."""
        async with self.engine_free:
            key = (seed, step)
            if ref.policy_version == 0 and key in self._first:
                return self._first[key]
            await self._give(ref)
            size = self.config.rollout.groups_per_step
            try:
                async with asyncio.TaskGroup() as playing:
                    jobs = [
                        playing.create_task(self.player.play_group(self.engine, number, task, kind="train"))
                        for number, task in enumerate(self._tasks_of(seed, step, size), start=step * size)
                    ]
            except BaseExceptionGroup as errors:
                raise_first(errors)
            groups = [job.result() for job in jobs]
            if ref.policy_version == 0:
                self._first[key] = groups
            return groups

    async def accuracy(self, ref: WeightsRef) -> float:
        """Mean reward on the held-out tasks."""
        async with self.engine_free:
            await self._give(ref)
            evaluation = await evaluate(
                self.held_out,
                make_group=lambda index, task: self.player.play_group(self.engine, index, task, kind="eval"),
                policy_version=ref.policy_version,
                max_concurrent_groups=32,
            )
        return evaluation.result.avg

    async def _give(self, ref: WeightsRef) -> None:
        await self.quiet()
        if self._held is not ref:
            self._held = None
            await self.engine.update_weights(ref)
            self._held = ref

    def _tasks_of(self, seed: int, step: int, size: int) -> Sequence[Task]:
        """The tasks of a step: the same under every rule, lag and rate."""
        if seed not in self._tasks:
            self._tasks[seed] = (TaskSource(self.env_class, self.config.env, seed=seed), [])
        source, tasks = self._tasks[seed]
        while len(tasks) < (step + 1) * size:
            tasks.append(source.next())
        return tasks[step * size : (step + 1) * size]


@asynccontextmanager
async def staged(config: Config, *, wait_while: Path | None = None) -> AsyncIterator[Stage]:
    """Sandbox and engine started, and the small model made where it is missing. Raises AgentRLError."""
    from agentrl.tokens.tokenizer import load_tokenizer

    env_class = load_env_class(config.env.target, config.env.kwargs)
    token = Secrets.from_environment({}).sandbox
    with TemporaryDirectory(prefix="stability-") as logs, launch.weights_folder(Path(logs)) as folder:
        async with launch.sandbox_service(config, logs=Path(logs), token=token) as (service, parts):
            await launch.sandbox_ready(service, parts, max_restarts=0)
            if not is_model_folder(Path(config.model.path)):
                from trainer.warmstart.train import warmstart

                print((await warmstart(config, out=Path(config.model.path), sandbox=service)).describe(), flush=True)
            sandbox = RememberingSandbox(service.url, token)
            async with (
                sandbox,
                opened(env_class, sandbox=sandbox) as make_env,
                launch_servers.engine_servers(config, model_path=config.model.path, logs=Path(logs)) as servers,
            ):
                await launch_servers.engines_ready(servers, config.engine)
                tokenizer = load_tokenizer(config.model)
                async with launch_servers.engine_client(servers, config) as engine:
                    yield Stage(
                        config=config,
                        env_class=env_class,
                        engine=engine,
                        player=GroupPlayer(make_env, settings_of(config), TokenRunners(tokenizer)),
                        held_out=held_out_tasks(env_class, config.env, num_tasks=config.eval.num_tasks),
                        folder=folder,
                        wait_while=wait_while,
                    )
                    print(f"{sandbox.num_executed} of {sandbox.num_calls} programs were executed", flush=True)


class Run:
    """One rule under one lag. `number` tells its weights from those of other runs.

    Example: `await Run(stage, spec, number=3).record()`.
    """

    def __init__(self, stage: Stage, spec: Spec, *, number: int = 0) -> None:
        self._stage, self._spec = stage, spec
        self._folder = stage.folder / f"run-{number}"
        self._versions: dict[int, WeightsRef] = {}
        self._probe_ids = tuple(range(64))
        self._steps: dict[str, list[float]] = {name: [] for name in NOTED}
        self._variances: list[dict[str, float]] = []

    async def record(self) -> dict[str, object]:
        """All steps, then the weights that no step waited for. Returns the results as plain numbers.

        A run whose weights break (NaN) ends there: `broken_at` is the step, and what was not played counts as 0.
        """
        spec, started_s = self._spec, time.monotonic()
        curve: list[float] = []
        broken_at, accuracy = None, 0.0
        try:
            learner = await self._in_turn(self._start)
            for step in range(spec.num_steps):
                groups = await self._stage.played(self._versions[max(step - spec.lag, 0)], spec.seed, step)
                curve += [_reward(groups)] if step >= spec.lag else []
                await self._in_turn(partial(self._train, learner, groups))
            curve += [reward async for reward in self._last_rewards()]
            accuracy = await self._stage.accuracy(self._versions[spec.num_steps])
        except LearnerError as error:
            if not self._versions:
                raise  # it did not start: no result of the rule
            broken_at = len(self._steps[NOTED[0]])
            print(f"{spec.rule} lag {spec.lag} seed {spec.seed}: broken at step {broken_at}: {error}", flush=True)
            curve += [0.0] * (spec.num_steps - len(curve))
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        return {
            **asdict(spec),
            "then": None,
            "accuracy": round(accuracy, 4),
            "broken_at": broken_at,
            "curve": [round(value, 3) for value in curve],
            **summary(self._steps),
            "variances": self._variances,
            "wall_s": round(time.monotonic() - started_s),
        }

    async def _in_turn(self, work: Callable[[], T]) -> T:
        """Compute in a thread, one run at a time."""
        async with self._stage.learner_free:
            await self._stage.quiet()
            return await asyncio.to_thread(work)

    async def _last_rewards(self) -> AsyncIterator[float]:
        """Rewards of the last `lag` weights, each sampled one for those before it too."""
        last, lag = self._spec.num_steps, self._spec.lag
        every = max(1, lag // SAMPLED_LATER)
        for step, first in enumerate(range(last - lag, last, every), start=last):
            newest = min(first + every, last) - 1
            reward = _reward(await self._stage.played(self._versions[newest], self._spec.seed, step))
            for _ in range(first, newest + 1):
                yield reward

    def _start(self) -> Learner:
        from trainer.learner import Learner

        learner = Learner(configured(self._stage.config, self._spec))
        self._publish(learner)
        return learner

    def _train(self, learner: Learner, groups: Sequence[TrajectoryGroup]) -> None:
        spec = self._spec
        seen = tuple(_with_rewards(group, spec) for group in groups)
        metrics = learner.step(Batch(policy_version=learner.policy_version, max_lag=spec.lag, groups=seen)).metrics
        for name, values in self._steps.items():
            values.append(metrics.get(f"learner/{name}", 0.0))
        if found := {name: float(f"{value:.3g}") for name, value in metrics.items() if name.startswith(VARIANCE)}:
            self._variances.append(found)
        self._probe_ids = tuple(groups[0].trajectories[0].token_ids()[:64])
        self._publish(learner)

    def _publish(self, learner: Learner) -> None:
        """Save the current weights, and remove those that no step needs any more."""
        from trainer.weights import folder as weights
        from trainer.weights.source import WeightSource

        version = learner.policy_version
        probe = Probe(token_ids=self._probe_ids, logprobs=tuple(learner.logprobs(self._probe_ids)))
        source = WeightSource(learner.model, dtype=learner.model.dtype)
        root = self._folder / str(version)
        self._versions[version] = weights.publish(source, root, policy_version=version, probe=probe)
        if (old := self._versions.pop(version - self._spec.lag - 1, None)) is not None:
            shutil.rmtree(self._folder / str(old.policy_version))


def configured(config: Config, spec: Spec) -> Config:
    """The config of a run's learner."""
    algorithm = TASK_RULES[spec.rule].model_copy(update={"variance_every": VARIANCE_EVERY})
    learner = config.learner.model_copy(update={"lr": spec.lr})
    return config.model_copy(update={"algorithm": algorithm, "learner": learner, "seed": spec.seed})


def _with_rewards(group: TrajectoryGroup, spec: Spec) -> TrajectoryGroup:
    """The group with the rewards that the learner is to see."""
    rewards = seen_by_learner(spec.rule, spec.reward, group.episode_rewards)
    episodes = (_rewarded(episode, reward) for episode, reward in zip(group.episodes, rewards, strict=True))
    return replace(group, episodes=tuple(episodes))


def _rewarded(episode: EpisodeRecord, reward: float) -> EpisodeRecord:
    return replace(episode, segments=tuple(replace(one, reward=reward) for one in episode.segments))


def _reward(groups: Sequence[TrajectoryGroup]) -> float:
    """Share of a batch's episodes that are right."""
    rewards = [reward for group in groups for reward in group.episode_rewards]
    return sum(rewards) / len(rewards)
