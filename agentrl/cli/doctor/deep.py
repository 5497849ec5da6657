"""Doctor's one expensive question: does this config's engine take the learner's weights, and do the two agree?

Both are started as a run starts them; the engine writes two answers, the learner trains one step on them, and its
weights are published before and after. Nothing of it is kept but logs, where something failed. Knows no environment.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cli.doctor.findings import Finding, crashed, fail, ok, warn
from agentrl.config import Config
from agentrl.engine import launch as launch_engines
from agentrl.engine import vllm_server as engine_server
from agentrl.engine.base import Parity
from agentrl.errors import AgentRLError, EngineError
from agentrl.train import launch
from agentrl.types import (
    Batch,
    EpisodeRecord,
    Sampling,
    StepOutput,
    StopReason,
    Task,
    Trajectory,
    TrajectoryGroup,
    Turn,
    user,
)

if TYPE_CHECKING:
    from agentrl.engine.base import Engine, TrainableEngine
    from agentrl.run_folder import RunFolder
    from agentrl.tokens.tokenizer import TurnTokenizer
    from agentrl.train.learner_api import LearnerSession
    from agentrl.types import WeightsRef

ENGINE, LEARNER, SYNC, PARITY = "engine start", "learner step", "weight sync", "logprob parity"
TASK = Task(id="doctor", prompt="Count from one to three.")
ANSWER_TOKENS = 32
WARMSTART = {"demonstrations": 32, "steps": 1}
"""Enough for a model of the config's shape; what it can do does not matter here."""
SLACK_S = 120.0
SYNC_MEND = 'docs/engine.md, "Weights in flight"; engine.weight_transfer=reload needs nothing of ours in the server'
PARITY_MEND = 'docs/engine.md, "Parity": the same model files and model.dtype on both sides, and vLLM as pinned'
STEP_MEND = "algorithm.refuse_below may be too strict, or the model's numbers are not finite: see learner.log"


async def engine_and_learner(config: Config, *, say: Callable[[str], None] = lambda text: None) -> list[Finding]:
    """Start both, update the weights twice, compare. `say` hears what is waited for. A failure is a finding too."""
    if config.engine.urls:
        what = "not tried: it changes the weights of engine.url, and a run may be using them"
        return [warn(SYNC, what, "ask where the engine runs: `agentrl doctor CONFIG engine.url=null --deep`")]
    folder = Path(tempfile.mkdtemp(prefix="agentrl-doctor-"))
    trial = _Trial(config, folder, say)
    has_failed = False
    try:
        async with asyncio.timeout(deadline_s := _deadline_s(config)) as deadline:
            await trial.run()
    except Exception as error:
        has_failed = True
        late = isinstance(error, TimeoutError) and deadline.expired()
        trial.failed(AgentRLError(f"not done within {deadline_s:g} s") if late else error)
    finally:
        if not has_failed:
            shutil.rmtree(folder, ignore_errors=True)
    return trial.findings


class _Trial:
    """A run of one step: what was found by the time it ended."""

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None]) -> None:
        self.findings: list[Finding] = []
        self._config = _for_trial(config, folder)
        self._folder = folder
        self._say = say
        self._token = secrets.token_urlsafe(16)
        self._stage = ENGINE

    def failed(self, error: Exception) -> None:
        """The finding of what ended it."""
        is_sync = isinstance(error, EngineError) and self._stage == LEARNER  # it asks nothing else of the engine
        name = SYNC if is_sync else self._stage
        said = crashed(name, error)
        self.findings.append(fail(name, said.found, f"the logs are in {self._folder}/trial/logs"))

    async def run(self) -> None:
        """Raises whatever ends it before all is compared."""
        from agentrl.run_folder import RunFolder

        await self._make_model()
        run = RunFolder.create(self._folder, "trial", config=self._config)
        async with AsyncExitStack() as stack:
            engine, turns = await self._engine(stack, run)
            session = await self._learner(stack, run, engine)
            await self._compared(session, engine, turns)

    async def _make_model(self) -> None:
        """The model that the warm start would make, hardly trained, where there is none yet."""
        from agentrl.run_folder import RunFolder
        from agentrl.train.training import is_model_folder

        config = self._config
        if config.model.warmstart is None or is_model_folder(Path(config.model.path)):
            return
        self._say("making a model of the warm start's shape")
        warmstart = config.model.warmstart.model_copy(update=WARMSTART)
        config = _changed(config, model={"path": str(self._folder / "model"), "warmstart": warmstart})
        run = RunFolder.create(self._folder, "model-run", config=config)
        async with launch.sandbox_service(config, logs=run.logs, token=self._token) as (sandbox, parts):
            await launch.sandbox_ready(sandbox, parts, max_restarts=0)
            async with launch.warmstart_process(
                config_path=run.config,
                out=Path(config.model.path),
                sandbox_url=sandbox.url,
                token=self._token,
                logs=run.logs,
                on_progress=lambda done, total: None,
            ) as part:
                await part.watch()
        self._config = config

    async def _engine(self, stack: AsyncExitStack, run: RunFolder) -> tuple[TrainableEngine, TurnTokenizer]:
        from agentrl.tokens.tokenizer import TurnTokenizer

        config, model = self._config, self._config.model
        self._say("starting the engine (vLLM)")
        started = time.monotonic()
        servers = await stack.enter_async_context(
            launch_engines.engine_servers(config, model_path=model.path, logs=run.logs, token=self._token)
        )
        await stack.enter_async_context(launch.watching(*launch_engines.parts_of(servers)))
        turns = await asyncio.to_thread(
            TurnTokenizer.load, model.path, renderer=model.renderer, template_args=model.chat_template_args
        )
        await launch_engines.engines_ready(servers, config.engine)
        # The difference is judged here: the client would call a wrong sum and wrong logprobs by the same name.
        judged_here = _changed(config, engine={"parity_bound": math.inf})
        engine = launch_engines.engine_client(servers, judged_here, token=self._token)
        await stack.enter_async_context(engine)
        what = engine_server.describe(config.engine).splitlines()[0]
        self.findings.append(ok(ENGINE, f"ready after {time.monotonic() - started:.0f} s: {what}"))
        return engine, turns

    async def _learner(self, stack: AsyncExitStack, run: RunFolder, engine: TrainableEngine) -> LearnerSession:
        from agentrl.engine.metered import MeteredEngine
        from agentrl.supervision.serving import serving
        from agentrl.train.learner_api import LearnerSessions, create_app

        self._stage = LEARNER
        self._say("starting the learner (DeepSpeed)")
        sessions = LearnerSessions(MeteredEngine(engine))
        session = await sessions.open()
        app = create_app(sessions, token=self._token)
        url = await stack.enter_async_context(serving(app, host="127.0.0.1", port=0))
        stack.push_async_callback(session.finish)  # after the learner's end: what it asked last is answered
        learner = await stack.enter_async_context(
            launch.learner_process(
                self._config,
                config_path=run.config,
                orchestrator_url=url,
                weights_dir=stack.enter_context(launch.weights_folder(run.path)),
                run_dir=run.path,
                token=self._token,
            )
        )
        await stack.enter_async_context(launch.watching(learner))
        return session

    async def _compared(self, session: LearnerSession, engine: Engine, turns: TurnTokenizer) -> None:
        """Weights of version 0, a step, weights of version 1."""
        settings, started = self._config.learner, time.monotonic()
        within_s = self._config.engine.update_timeout_s
        await session.weights(within_s=settings.start_timeout_s + within_s)
        self._stage = ENGINE
        batch = await _batch(engine, turns)
        self._stage = LEARNER
        self._say("training one step")
        output = await session.train(batch, within_s=settings.step_timeout_s)
        self.findings.append(_step(output, seconds=time.monotonic() - started))
        self._stage = SYNC
        self._say("updating the weights")
        ref = await session.weights(within_s=within_s)
        assert session.last_update is not None
        self.findings.append(_sync(ref, self._config, gap_s=session.last_update.gap_s))
        self._stage = PARITY
        self.findings.append(judged(session.last_update.parity, output.metrics, bound=bound_of(self._config)))


def bound_of(config: Config) -> float:
    """Largest allowed difference on the probe."""
    bound = config.engine.parity_bound
    return launch_engines.PARITY_BOUNDS[config.model.dtype] if bound == "auto" else bound


def judged(probe: Parity | None, metrics: dict[str, float], *, bound: float) -> Finding:
    """`probe`: under the weights after the step. `metrics`: the learner's, of the tokens that the engine sampled."""
    if probe is None:
        return fail(PARITY, "the engine's update was not probed", PARITY_MEND)
    sampled, mean = metrics.get("learner/parity_max_abs", math.inf), metrics.get("learner/parity_mean_abs", math.inf)
    found = (
        f"|engine - learner| at most {probe.max_abs:.1e} nats on the probe, {sampled:.1e} on sampled tokens "
        f"({mean:.1e} on average); {bound:g} is allowed"
    )
    if not probe.max_abs <= bound:
        return fail(PARITY, found, PARITY_MEND)
    if not sampled <= bound:
        return warn(PARITY, found, PARITY_MEND)
    return ok(PARITY, found)


def _step(output: StepOutput, *, seconds: float) -> Finding:
    if output.metrics.get("learner/skipped_steps"):
        return warn(LEARNER, "the step on two answers was refused, and the weights kept", STEP_MEND)
    return ok(LEARNER, f"started, and a step on two answers made, in {seconds:.0f} s")


def _sync(ref: WeightsRef, config: Config, *, gap_s: float) -> Finding:
    """An update that returned was proven by the client: its version, and its checksum where there is one."""
    way = engine_server.transfer_of(config.engine)
    found = f"versions 0 and 1 taken by {way}, {ref.num_bytes / 1e6:.4g} MB, generation paused for {gap_s:.2f} s"
    if not ref.checksum:
        return warn(SYNC, f"{found}; {way} has no checksum", "engine.weight_transfer=safetensors has one")
    return ok(SYNC, f"{found}; checksum {ref.checksum[:12]} on both sides")


async def _batch(engine: Engine, turns: TurnTokenizer) -> Batch:
    """Two answers to one prompt, of which one is called right."""
    prompt = turns.first_prompt([user(TASK.prompt)])
    sampling = Sampling(max_tokens=ANSWER_TOKENS, stop_token_ids=turns.stop_token_ids)
    completions = await asyncio.gather(
        *(engine.generate(prompt, sampling, request_id=f"doctor-{index}") for index in range(2))
    )
    trajectories = [
        Trajectory(
            id=f"doctor-{index}",
            task_id=TASK.id,
            turns=(Turn(observation_ids=tuple(prompt), completion=completion),),
            messages=(),
            reward=float(index),
            rewards={"doctor": float(index)},
            stop_reason=StopReason.COMPLETED,
        )
        for index, completion in enumerate(completions)
    ]
    episodes = tuple(EpisodeRecord(id=one.id, segments=(one,)) for one in trajectories)
    return Batch(
        policy_version=0,
        max_lag=0,
        groups=(TrajectoryGroup(group_id=0, task=TASK, episodes=episodes),),
    )


def _for_trial(config: Config, folder: Path) -> Config:
    """Its files in `folder`, every update probed, and a part that dies is not started again."""
    return _changed(
        config,
        engine={"parity_every": 1, "max_restarts": 0},
        learner={"checkpoint_every": 0, "save_every": 0},
    ).model_copy(update={"out_dir": str(folder)})


def _changed(config: Config, **sections: dict[str, Any]) -> Config:
    """With some keys of some sections set."""
    changed = {name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    return config.model_copy(update=changed)


def _deadline_s(config: Config) -> float:
    """What a run would allow each part, one after the other."""
    engine, learner = config.engine, config.learner
    updates_s = 2 * engine.update_timeout_s + engine.request_timeout_s
    return SLACK_S + engine.start_timeout_s + learner.start_timeout_s + learner.step_timeout_s + updates_s
