"""Tests the toy's findings on a real task: the quickstart's, with its engine, sandbox and learner, at a fixed lag.

Each step, the weights of `lag` steps ago play 8 tasks x 8 episodes in the engine, and the learner takes one step on all
of them: no group is dropped, so that every rule trains on as many episodes. The runs of a seed begin with the same
weights and tasks; what the engine samples is its own.

    python -m benchmarks.stability_task --out task.jsonl             # resumable, a line a run
    python -m benchmarks.stability_task --out task.jsonl --report    # tables to the terminal, a picture to docs/

Collapsed and fell are the toy's words (stability.py), with 64 held-out tasks x 4 episodes at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from agentrl import config as config_module
from agentrl.chat.runners import TokenRunners
from agentrl.config import Config
from agentrl.data.source import TaskSource, held_out_tasks
from agentrl.engine import launch_servers
from agentrl.env import Env, load_env_class, opened
from agentrl.report.evaluation import evaluate
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import settings_of
from agentrl.supervision.secrets import Secrets
from agentrl.training import launch
from agentrl.training.model_folder import is_model_folder
from agentrl.types import Batch, Probe, Task, TrajectoryGroup, WeightsRef
from benchmarks import stability_task_report
from benchmarks.reporting import ROOT
from benchmarks.stability import load
from benchmarks.stability_rules import RULES

if TYPE_CHECKING:
    from agentrl.engine.base import TrainableEngine
    from trainer.learner import Learner

OWN_RULES = [name for name, rule in RULES.items() if rule.is_a_setting]
SAMPLED_LATER = 4
"""Of the last `lag` weights, which no step waits for, this many are sampled for the curve."""
VARIANCE_EVERY = 40
NOTED = (
    *("ess_ratio", "mean_weight", "max_weight", "clip_fraction", "grad_norm", "entropy", "kl", "lr_scale"),
    *("baseline_minus_mean", "baseline_minus_mean_max", "groups_without_gradient", "skipped_steps", "lag_max"),
)
"""Metrics of the learner, without their prefix, kept of every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One run."""

    rule: str
    lag: int
    seed: int
    lr: float
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The parts that all runs share."""

    config: Config
    env_class: type[Env]
    engine: TrainableEngine
    player: GroupPlayer[TrainableEngine]
    held_out: Sequence[Task]
    folder: Path
    """In memory, for weights."""


@asynccontextmanager
async def staged(config: Config) -> AsyncIterator[Stage]:
    """Sandbox and engine started, and the small model made where it is missing. Raises AgentRLError."""
    from agentrl.tokens.tokenizer import load_tokenizer

    env_class = load_env_class(config.env.target, config.env.kwargs)
    with TemporaryDirectory(prefix="stability-") as logs, launch.weights_folder(Path(logs)) as folder:
        async with launch.sandbox_service(config, logs=Path(logs), token=Secrets.from_environment({}).sandbox) as (
            sandbox,
            parts,
        ):
            await launch.sandbox_ready(sandbox, parts, max_restarts=0)
            if not is_model_folder(Path(config.model.path)):
                from trainer.warmstart.train import warmstart

                print((await warmstart(config, out=Path(config.model.path), sandbox=sandbox)).describe(), flush=True)
            async with (
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
                    )


class Run:
    """One rule under one lag."""

    def __init__(self, stage: Stage, spec: Spec) -> None:
        from trainer.learner import Learner

        self._stage, self._spec = stage, spec
        self._source = TaskSource(stage.env_class, stage.config.env, seed=spec.seed)
        self._learner: Learner = Learner(_configured(stage.config, spec))
        self._versions: dict[int, WeightsRef] = {}
        self._held: WeightsRef | None = None
        self._num_groups = 0
        self._probe_ids = tuple(range(64))
        self._curve: list[float] = []
        self._steps: dict[str, list[float]] = {name: [] for name in NOTED}
        self._variances: list[dict[str, float]] = []

    async def record(self) -> dict[str, object]:
        """All steps, then the weights that no step waited for. Returns the results as plain numbers."""
        spec, started_s = self._spec, time.monotonic()
        self._publish()
        groups = await self._played(0)
        for step in range(spec.num_steps):
            if step >= spec.lag:
                self._curve.append(_reward(groups))
            async with asyncio.TaskGroup() as both:
                training = both.create_task(asyncio.to_thread(self._train, groups))
                if not spec.lag:
                    await training
                if step + 1 < spec.num_steps:
                    groups = await self._played(max(step + 1 - spec.lag, 0))
        last = spec.num_steps
        every = max(1, spec.lag // SAMPLED_LATER)
        for version in range(last - spec.lag + every - 1, last, every):
            self._curve += [_reward(await self._played(version))] * every
        return {
            **asdict(spec),
            "then": None,
            "accuracy": await self._accuracy(),
            "curve": [round(value, 4) for value in self._curve],
            "steps": self._steps,
            "variances": self._variances,
            "wall_s": round(time.monotonic() - started_s),
        }

    def _train(self, groups: Sequence[TrajectoryGroup]) -> None:
        version, lag = self._learner.policy_version, self._spec.lag
        metrics = self._learner.step(Batch(policy_version=version, max_lag=lag, groups=tuple(groups))).metrics
        for name, values in self._steps.items():
            values.append(float(f"{metrics.get(f'learner/{name}', 0.0):.4g}"))
        if found := {name: value for name, value in metrics.items() if name.startswith(stability_task_report.VARIANCE)}:
            self._variances.append(found)
        self._probe_ids = tuple(groups[0].trajectories[0].token_ids()[:64])
        self._publish()

    def _publish(self) -> None:
        """Save the current weights, and remove those that no step needs any more."""
        from trainer.weights import folder as weights
        from trainer.weights.source import WeightSource

        version = self._learner.policy_version
        probe = Probe(token_ids=self._probe_ids, logprobs=tuple(self._learner.logprobs(self._probe_ids)))
        source = WeightSource(self._learner.model, dtype=self._learner.model.dtype)
        root = self._stage.folder / str(version)
        self._versions[version] = weights.publish(source, root, policy_version=version, probe=probe)
        if (old := self._versions.pop(version - self._spec.lag - 1, None)) is not None:
            shutil.rmtree(self._stage.folder / str(old.policy_version))

    async def _played(self, version: int) -> list[TrajectoryGroup]:
        """A step's groups, by these weights."""
        await self._give(version)
        settings = self._stage.config.rollout
        async with asyncio.TaskGroup() as playing:
            jobs = []
            for _ in range(settings.groups_per_step):
                job = self._stage.player.play_group(
                    self._stage.engine, self._num_groups, self._source.next(), kind="train"
                )
                jobs.append(playing.create_task(job))
                self._num_groups += 1
        return [job.result() for job in jobs]

    async def _give(self, version: int) -> None:
        if self._held is not (ref := self._versions[version]):
            await self._stage.engine.update_weights(ref)
            self._held = ref

    async def _accuracy(self) -> float:
        stage = self._stage
        await self._give(self._learner.policy_version)
        evaluation = await evaluate(
            stage.held_out,
            make_group=lambda index, task: stage.player.play_group(stage.engine, index, task, kind="eval"),
            policy_version=self._learner.policy_version,
            max_concurrent_groups=32,
        )
        return evaluation.result.avg


def _configured(config: Config, spec: Spec) -> Config:
    algorithm = RULES[spec.rule].algorithm.model_copy(update={"variance_every": VARIANCE_EVERY})
    learner = config.learner.model_copy(update={"lr": spec.lr})
    return config.model_copy(update={"algorithm": algorithm, "learner": learner, "seed": spec.seed})


def _reward(groups: Sequence[TrajectoryGroup]) -> float:
    rewards = [reward for group in groups for reward in group.rewards_G]
    return sum(rewards) / len(rewards)


def specs_of(given: argparse.Namespace) -> list[Spec]:
    """Seed by seed, so that an interrupted sweep has every rule equally often."""
    return [
        Spec(rule=rule, lag=lag, seed=seed, lr=given.lr, num_steps=given.steps)
        for lag in given.lags
        for seed in given.seeds
        for rule in given.rules
    ]


async def sweep(config: Config, specs: Sequence[Spec], out: Path) -> None:
    """Run what `out` does not have yet."""
    done = [{name: run[name] for name in Spec.__dataclass_fields__} for run in load(out)]
    async with staged(config) as stage:
        for spec in specs:
            if asdict(spec) in done:
                continue
            run = await Run(stage, spec).record()
            with out.open("a") as file:
                file.write(json.dumps(run) + "\n")
            print(
                f"{spec.rule:12} lag {spec.lag} seed {spec.seed}: {run['accuracy']:.2f}, {run['wall_s']} s", flush=True
            )


def main() -> None:
    """Sweep, or report on one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--model", help="folder of the model that all runs begin with; made where it is missing")
    parser.add_argument("--rules", nargs="+", default=OWN_RULES, choices=OWN_RULES)
    parser.add_argument("--lags", nargs="+", type=int, default=[32])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(8)))
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=Path("stability_task.jsonl"))
    parser.add_argument("--report", action="store_true", help="tables and a picture of --out instead of runs")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs", help="where --report draws")
    given = parser.parse_args()
    if given.report:
        print(stability_task_report.tables(load(given.out)))
        print("drawn:", stability_task_report.draw(load(given.out), given.pictures))
        return
    from trainer import ranks

    ranks.set_defaults(os.environ)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    config = config_module.load(given.config, [f"model.path={given.model}"] if given.model else [])
    asyncio.run(sweep(config, specs_of(given), given.out))


if __name__ == "__main__":
    main()
