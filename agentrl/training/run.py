"""One run of `agentrl train`: starts every process of the run, trains, and stops everything again, also after errors.

Independent of the command line (agentrl/cli) and of the trainer, which it starts as a command.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.chat.runners import TokenRunners
from agentrl.check import rehearse
from agentrl.config import Config
from agentrl.data.duplicates import refuse_overlap
from agentrl.data.source import TaskSource, first_training_tasks
from agentrl.engine import launch_servers, vllm_command
from agentrl.engine.shared import WithSpare
from agentrl.engine.vllm_server import start_timeout_s
from agentrl.env.canary import Canaries
from agentrl.errors import DiskError
from agentrl.report.evaluation import HeldOutSet
from agentrl.report.metrics import MetricsLog
from agentrl.report.observer import Observer, Summary
from agentrl.report.sinks.base import check_installed
from agentrl.rollouts.group import PlayGroup
from agentrl.rollouts.long_prompts import refuse_long_prompts
from agentrl.rollouts.monitored_env import monitored
from agentrl.rollouts.set_envs import TRAINING, MakeEnv, load_envs, opened_envs, players_of, tasks_of_set
from agentrl.run_folder import RunFolder
from agentrl.supervision.secrets import Secrets
from agentrl.supervision.serving import serving
from agentrl.supervision.watchdog import supervised
from agentrl.training import launch, launch_ranks
from agentrl.training.evaluations import SPARE, SpareEngines
from agentrl.training.learner_api import create_app
from agentrl.training.model_folder import check_model, check_reference, check_trainable, is_model_folder
from agentrl.training.orchestrator import Orchestrator, RolloutParts
from agentrl.workers import launch as workers
from agentrl.workers.records import RunInfo

if TYPE_CHECKING:
    from agentrl.engine.base import Engine, TrainableEngine
    from agentrl.engine.launch_servers import EngineServer
    from agentrl.engine.metered import MeteredEngine
    from agentrl.engine.pool import EnginePool
    from agentrl.engine.vllm_engine import VLLMEngine
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
        self._secrets = (secrets or Secrets.from_environment({})).for_place(config.place)
        self._learner_at = learner_at
        is_elsewhere = learner_at is not None and bool(config.engine.urls)
        self._placement = vllm_command.placement_of(config, has_learner=not is_elsewhere)
        self._envs = load_envs(config)
        self._env_class = self._envs[TRAINING].env_class
        # Read before anything is started: a broken row should cost a second, not a minute.
        self._held_out = {name: tasks_of_set(name, self._envs[name]) for name in config.eval_sets}
        self._source = TaskSource(self._env_class, config.env, seed=config.seed, choice=config.rollout.task_choice)
        for name in self._held_out:
            held_out = self._envs[name]
            refuse_overlap(self._env_class, held_out.config.env, test_class=held_out.env_class)

    async def run(self, folder: RunFolder) -> Summary:
        """Train in `folder`, which keeps everything written by then after an error. Raises AgentRLError."""
        self._run = folder
        async with AsyncExitStack() as stack:
            watched = supervised(self._config.train, folder, placement=str(self._placement))
            self._wait_graph = await stack.enter_async_context(watched)
            with self._phase("joining the Ray cluster") if self._config.place == "ray" else nullcontext():
                self._place = await stack.enter_async_context(launch.place_of(self._config))
                if self._learner_at is None:
                    await self._place.reserve(launch.needs_of(self._config))
            return await self._with_sandbox()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self._observer.phase(name), self._wait_graph.phase(name):
            yield

    async def _with_sandbox(self) -> Summary:
        async with launch.sandbox_service(
            self._config, logs=self._run.logs, token=self._secrets.sandbox, place=self._place
        ) as (sandbox, parts):
            with self._phase("starting the sandbox"):
                await launch.sandbox_ready(sandbox, parts, max_restarts=self._config.sandbox.max_restarts)
            async with launch.watching(*parts), opened_envs(self._envs, sandbox=sandbox) as make_envs:
                await self._try_out(make_envs, sandbox)
                model_path = await self._model(sandbox)
                return await self._with_engine(make_envs, model_path, sandbox)

    async def _try_out(self, make_envs: Mapping[str, MakeEnv], sandbox: SandboxClient) -> None:
        """Check the sandbox and the graders, and play a scripted episode of each held-out set."""
        self._canaries = Canaries(self._env_class, make_env=make_envs[TRAINING], sandbox=sandbox)
        with self._wait_graph.phase("checking the sandbox and the grader"):
            await self._canaries.check(when="at the start")
            for name in self._held_out:
                if (env_class := self._envs[name].env_class) is not self._env_class:
                    others = Canaries(env_class, make_env=make_envs[name], sandbox=None)
                    await others.check(when=f"at the start, of eval.sets.{name}")
        with self._wait_graph.phase("playing a scripted episode"):
            limit_s = self._config.rollout.episode_timeout_s
            tasks = {name: held_out[0] for name, held_out in self._held_out.items()}
            if all(self._envs[name].identity != self._envs[TRAINING].identity for name in tasks):
                env, seed = self._config.env, self._config.seed
                tasks[TRAINING] = first_training_tasks(self._env_class, env, seed=seed, num_tasks=1)[0]
            for name, task in tasks.items():
                await rehearse(self._envs[name].env_class, make_envs[name], task, limit_s=limit_s)

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
                place=self._place,
            ) as part:
                await part.watch()
        return model.path

    async def _with_engine(self, make_envs: Mapping[str, MakeEnv], model_path: str, sandbox: SandboxClient) -> Summary:
        from agentrl.tokens.tokenizer import load_tokenizer

        tokenizer = await asyncio.to_thread(load_tokenizer, self._config.model, model_path)
        with self._wait_graph.phase("measuring the prompts"):
            await self._refuse_long_prompts(make_envs, tokenizer)
        async with (
            launch_servers.engine_servers(
                self._config,
                model_path=model_path,
                logs=self._run.logs,
                token=self._secrets.engine,
                place=self._place,
            ) as servers,
            launch_servers.engine_servers(
                self._config,
                model_path=model_path,
                logs=self._run.logs,
                token=self._secrets.engine,
                is_spare=True,
                place=self._place,
            ) as spare,
            launch.watching(*launch_servers.parts_of([*servers, *spare])),
        ):
            with self._phase(launch_servers.start_phase(self._config.engine)):
                within_s = start_timeout_s(self._config.engine)
                with self._wait_graph.waiting("run", on="engine", what="its start", within_s=within_s):
                    await launch_servers.engines_ready([*servers, *spare], self._config.engine)
            monitored_envs = {name: monitored(make, self._wait_graph) for name, make in make_envs.items()}
            players = players_of(self._envs, monitored_envs, TokenRunners(tokenizer))
            play_here = {name: one.play_group for name, one in players.items()}
            spare_client = self._client(spare, SPARE) if spare else nullcontext()
            async with self._client(servers, "engine") as engine, spare_client as spare_engine:
                self._engine_urls = [server.address() for server in (*servers, *spare)]
                if self._config.rollout.has_workers:
                    return await self._with_workers(engine, spare_engine, model_path, sandbox)
                return await self._with_learner(engine, play_here, spare=self._spare_engines(spare_engine, play_here))

    def _client(self, servers: Sequence[EngineServer], name: str) -> VLLMEngine | EnginePool:
        on_tokens = partial(self._wait_graph.beat, name)
        return launch_servers.engine_client(servers, self._config, token=self._secrets.engine, on_tokens=on_tokens)

    def _spare_engines(
        self, engine: TrainableEngine | None, players: Mapping[str, PlayGroup[Engine]]
    ) -> SpareEngines | None:
        """Those of eval.engines, and who plays with them."""
        return None if engine is None else SpareEngines(engine=engine, held_out=self._held_out_sets(players))

    async def _with_workers(
        self,
        engine: VLLMEngine | EnginePool,
        spare: VLLMEngine | EnginePool | None,
        model_path: str,
        sandbox: SandboxClient,
    ) -> Summary:
        info = RunInfo(config=self._config.model_dump(mode="json"), model_path=model_path, sandbox_url=sandbox.url)
        async with (
            workers.rollout_workers(
                self._config,
                engine if spare is None else WithSpare(engine, spare),
                info,
                secrets=self._secrets,
                logs=self._run.logs,
                wait_graph=self._wait_graph,
                place=self._place,
                sandbox_url=lambda: sandbox.url,
            ) as (dispatcher, parts),
            launch.watching(*parts),
        ):
            with self._phase("starting the rollout workers"):
                await workers.workers_ready(dispatcher, parts, self._wait_graph)
            num_plays = {name: self._envs[name].config.eval.samples_per_task for name in self._held_out}
            beside = {name: dispatcher.of_set(name, num_plays=num, is_spare=True) for name, num in num_plays.items()}
            players = {name: dispatcher.of_set(name, num_plays=num) for name, num in num_plays.items()}
            players[TRAINING] = dispatcher.play_group
            return await self._with_learner(
                engine, players, spare=self._spare_engines(spare, beside), measure_with=dispatcher.measure_with
            )

    async def _refuse_long_prompts(self, make_envs: Mapping[str, MakeEnv], tokenizer: TurnTokenizer) -> None:
        """Raises ConfigError for a held-out prompt, or one of the first training prompts, that leaves no room."""
        config = self._config
        first = first_training_tasks(self._env_class, config.env, seed=config.seed, num_tasks=NUM_FIRST_TASKS)
        for name, tasks in (*self._held_out.items(), (TRAINING, first)):
            await refuse_long_prompts(tasks, make_env=make_envs[name], tokenizer=tokenizer, config=config.rollout)

    async def _with_learner(
        self,
        engine: TrainableEngine,
        players: Mapping[str, PlayGroup[Engine]],
        *,
        spare: SpareEngines | None,
        measure_with: Callable[[MeteredEngine], None] = lambda engine: None,
    ) -> Summary:
        async with self._metrics() as metrics:
            orchestrator = Orchestrator(
                self._config,
                engine=engine,
                rollout_parts=RolloutParts(
                    play_group=players[TRAINING],
                    source=self._source,
                    held_out=self._held_out_sets(players),
                    spare=spare,
                    canaries=self._canaries,
                    measure_with=measure_with,
                ),
                run=self._run,
                metrics=metrics,
                observer=self._observer,
                wait_graph=self._wait_graph,
            )
            host, port = self._learner_at or (self._place.here, 0)
            app = create_app(orchestrator.sessions, token=self._secrets.run)
            async with serving(app, host=host, port=port) as url:
                return await (orchestrator.run() if self._learner_at else self._with_own_learner(orchestrator, url))

    def _held_out_sets(self, players: Mapping[str, PlayGroup[Engine]]) -> list[HeldOutSet[Engine]]:
        return [
            HeldOutSet(
                name=name,
                tasks=tasks,
                num_plays=self._envs[name].config.eval.samples_per_task,
                play_group=players[name],
            )
            for name, tasks in self._held_out.items()
        ]

    @asynccontextmanager
    async def _metrics(self) -> AsyncIterator[MetricsLog]:
        with MetricsLog(self._run, sinks=self._config.metrics.sinks) as metrics:
            try:
                yield metrics
            finally:
                await asyncio.to_thread(metrics.close_sinks)  # which may wait for a network

    async def _with_own_learner(self, orchestrator: Orchestrator, url: str) -> Summary:
        with launch.weights_folder(self._run.path, urls=self._engine_urls) as weights_dir:
            async with launch.learner_process(
                self._config,
                config_path=self._run.config,
                orchestrator_url=url,
                weights_dir=weights_dir,
                run_dir=self._run.path,
                token=self._secrets.run,
                may_end=lambda: orchestrator.sessions.is_done,
                place=self._place,
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
    from agentrl.view.bundle import write_report

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
