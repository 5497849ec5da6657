"""One run of `agentrl train`: starts every process of the run, trains, and stops everything again, also after errors.

Independent of the command line (agentrl/cli) and of the trainer, which it starts as a command.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.chat.runners import TokenRunners
from agentrl.check import rehearse
from agentrl.config import Config
from agentrl.data.duplicates import refuse_overlap
from agentrl.data.source import TaskSource, first_training_tasks, held_out_tasks
from agentrl.engine import launch_servers, vllm_command
from agentrl.engine.vllm_server import start_timeout_s
from agentrl.env import Env, load_env_class, opened
from agentrl.env.canary import Canaries
from agentrl.errors import DiskError
from agentrl.report.metrics import MetricsLog
from agentrl.report.observer import Observer, Summary
from agentrl.report.sinks.base import check_installed
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.long_prompts import refuse_long_prompts
from agentrl.rollouts.monitored_env import monitored
from agentrl.rollouts.settings import settings_of
from agentrl.run_folder import RunFolder
from agentrl.supervision.secrets import Secrets
from agentrl.supervision.serving import serving
from agentrl.supervision.watchdog import supervised
from agentrl.training import launch, launch_ranks
from agentrl.training.learner_api import create_app
from agentrl.training.model_folder import check_model, check_reference, check_trainable, is_model_folder
from agentrl.training.orchestrator import Orchestrator, RolloutParts
from agentrl.wrappers import load_wrappers

if TYPE_CHECKING:
    from agentrl.engine.base import Engine, TrainableEngine
    from agentrl.supervision.child import Child
    from agentrl.tokens.tokenizer import TurnTokenizer
    from sandbox.client import SandboxClient

LEARNER_EXIT_TIMEOUT_S = 10.0
NUM_FIRST_TASKS = 1000
"""Training tasks whose prompts are measured before the engine starts."""


class Training:
    """One run on this machine. Each method starts one part and runs the rest inside it: all stop in reverse order.

    Args:
        secrets: of parts that already run, and for those that are started here.
        learner_at: (host, port) on which to wait for a learner that is started elsewhere; None starts one here.

    Raises ConfigError, DataError, EnvError at construction, before any process is started.

    Example:
        training = Training(config, observer)
        summary = await training.run(RunFolder.create(config.out_dir, config.name, config=config))
    """

    def __init__(
        self,
        config: Config,
        observer: Observer,
        *,
        secrets: Secrets | None = None,
        learner_at: tuple[str, int] | None = None,
    ) -> None:
        check_trainable(config)
        check_model(config)
        check_reference(config)
        check_installed(config.metrics.sinks)
        if learner_at is None:
            launch_ranks.check_hosts(config.learner)
        self._config = config
        self._observer = observer
        self._secrets = secrets or Secrets.from_environment({})
        self._learner_at = learner_at
        is_elsewhere = learner_at is not None and bool(config.engine.urls)
        self._placement = vllm_command.placement_of(config, has_learner=not is_elsewhere)
        self._env_class = load_env_class(config.env.target, config.env.kwargs)
        self._wrappers = load_wrappers(config.env.wrappers)
        # Read before anything is started: a broken row should cost a second, not a minute.
        self._held_out = held_out_tasks(self._env_class, config.env, num_tasks=config.eval.num_tasks)
        self._source = TaskSource(self._env_class, config.env, seed=config.seed, choice=config.rollout.task_choice)
        refuse_overlap(self._env_class, config.env)

    async def run(self, folder: RunFolder) -> Summary:
        """Train in `folder`, which keeps everything written by then after an error. Raises AgentRLError."""
        self._run = folder
        async with supervised(self._config.train, folder, placement=str(self._placement)) as self._wait_graph:
            return await self._with_sandbox()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self._observer.phase(name), self._wait_graph.phase(name):
            yield

    async def _with_sandbox(self) -> Summary:
        async with launch.sandbox_service(self._config, logs=self._run.logs, token=self._secrets.sandbox) as (
            sandbox,
            parts,
        ):
            with self._phase("starting the sandbox"):
                await launch.sandbox_ready(sandbox, parts, max_restarts=self._config.sandbox.max_restarts)
            async with (
                launch.watching(*parts),
                opened(self._env_class, sandbox=sandbox, wrappers=self._wrappers) as make_env,
            ):
                self._canaries = Canaries(self._env_class, make_env=make_env, sandbox=sandbox)
                with self._wait_graph.phase("checking the sandbox and the grader"):
                    await self._canaries.check(when="at the start")
                with self._wait_graph.phase("playing a scripted episode"):
                    limit_s = self._config.rollout.episode_timeout_s
                    await rehearse(self._env_class, make_env, self._held_out[0], limit_s=limit_s)
                model_path = await self._model(sandbox)
                return await self._with_engine(make_env, model_path)

    async def _model(self, sandbox: SandboxClient) -> str:
        """The path of the model. The warm start makes it first where it is missing and the config has that section."""
        model = self._config.model
        if model.warmstart is None or is_model_folder(Path(model.path)):
            return model.path
        name = "warm start: learning from demonstrations"
        with self._observer.phase(name) as advance, self._wait_graph.phase(name):

            def on_progress(done: int, total: int) -> None:
                self._wait_graph.beat("warm start")
                advance(done, total)

            async with launch.warmstart_process(
                config_path=self._run.config,
                out=Path(model.path),
                sandbox_url=sandbox.url,
                token=self._secrets.sandbox,
                logs=self._run.logs,
                on_progress=on_progress,
            ) as part:
                await part.watch()
        return model.path

    async def _with_engine(self, make_env: Callable[[], Env], model_path: str) -> Summary:
        from agentrl.tokens.tokenizer import load_tokenizer

        tokenizer = await asyncio.to_thread(load_tokenizer, self._config.model, model_path)
        with self._wait_graph.phase("measuring the prompts"):
            await self._refuse_long_prompts(make_env, tokenizer)
        async with (
            launch_servers.engine_servers(
                self._config, model_path=model_path, logs=self._run.logs, token=self._secrets.engine
            ) as servers,
            launch.watching(*launch_servers.parts_of(servers)),
        ):
            with self._phase(launch_servers.start_phase(self._config.engine)):
                within_s = start_timeout_s(self._config.engine)
                with self._wait_graph.waiting("run", on="engine", what="its start", within_s=within_s):
                    await launch_servers.engines_ready(servers, self._config.engine)
            make_env = monitored(make_env, self._wait_graph)
            player = GroupPlayer(make_env, settings_of(self._config), TokenRunners(tokenizer))
            on_tokens = partial(self._wait_graph.beat, "engine")
            async with launch_servers.engine_client(
                servers, self._config, token=self._secrets.engine, on_tokens=on_tokens
            ) as engine:
                return await self._with_learner(engine, player)

    async def _refuse_long_prompts(self, make_env: Callable[[], Env], tokenizer: TurnTokenizer) -> None:
        """Raises ConfigError for a held-out prompt, or one of the first training prompts, that leaves no room."""
        config = self._config
        first = first_training_tasks(self._env_class, config.env, seed=config.seed, num_tasks=NUM_FIRST_TASKS)
        for tasks in (self._held_out, first):
            await refuse_long_prompts(tasks, make_env=make_env, tokenizer=tokenizer, config=config.rollout)

    async def _with_learner(self, engine: TrainableEngine, player: GroupPlayer[Engine]) -> Summary:
        async with self._metrics() as metrics:
            orchestrator = Orchestrator(
                self._config,
                engine=engine,
                rollout_parts=RolloutParts(
                    play_group=player.play_group,
                    source=self._source,
                    held_out=self._held_out,
                    canaries=self._canaries,
                ),
                run=self._run,
                metrics=metrics,
                observer=self._observer,
                wait_graph=self._wait_graph,
            )
            host, port = self._learner_at or ("127.0.0.1", 0)
            app = create_app(orchestrator.sessions, token=self._secrets.run)
            async with serving(app, host=host, port=port) as url:
                return await (orchestrator.run() if self._learner_at else self._with_own_learner(orchestrator, url))

    @asynccontextmanager
    async def _metrics(self) -> AsyncIterator[MetricsLog]:
        with MetricsLog(self._run, sinks=self._config.metrics.sinks) as metrics:
            try:
                yield metrics
            finally:
                await asyncio.to_thread(metrics.close_sinks)  # which may wait for a network

    async def _with_own_learner(self, orchestrator: Orchestrator, url: str) -> Summary:
        with launch.weights_folder(self._run.path, urls=self._config.engine.urls) as weights_dir:
            async with launch.learner_process(
                self._config,
                config_path=self._run.config,
                orchestrator_url=url,
                weights_dir=weights_dir,
                run_dir=self._run.path,
                token=self._secrets.run,
                may_end=lambda: orchestrator.sessions.is_done,
            ) as learner:
                return await self._watched(orchestrator, learner)

    async def _watched(self, orchestrator: Orchestrator, learner: Child) -> Summary:
        async with launch.watching(learner):
            restarts = asyncio.create_task(self._restartable(orchestrator, learner), name="restarts of the learner")
            try:
                summary = await orchestrator.run()
            finally:
                restarts.cancel()
            with suppress(TimeoutError):  # it reported that it is done; leaving its block ends it
                async with asyncio.timeout(LEARNER_EXIT_TIMEOUT_S):
                    await learner.wait()
            return summary

    async def _restartable(self, orchestrator: Orchestrator, learner: Child) -> None:
        """Allow restarts once the learner has started: of a learner that cannot start, the first error matters."""
        await orchestrator.learner_connected()
        learner.allow_restarts(self._config.learner.max_restarts)


async def train(training: Training, run: RunFolder, observer: Observer) -> Summary:
    """Run `training` with the folder locked, then write the report, also after an error, and tell the summary."""
    from agentrl.report.page import write_report

    with run.locked():
        observer.run_folder(run.path)
        try:
            with observer:
                summary = await training.run(run)
        except BaseException:
            with suppress(DiskError):  # the error that ended the run matters more
                write_report(run)
            raise
        observer.summary(summary, run.path, write_report(run))
    return summary
