"""Plays held-out tasks with a model folder, a hub name or a running server, with the code of training.

`measuring.py` has the functions that users call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from agentrl.chat.chat_model import ChatModel
from agentrl.chat.runners import EndpointRunners, TokenRunners
from agentrl.check import rehearse
from agentrl.config import Config, parse
from agentrl.data.source import held_out_tasks
from agentrl.engine import launch_servers
from agentrl.engine.base import Engine
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.env import Env, load_env_class, opened, rows_of
from agentrl.env.canary import Canaries
from agentrl.errors import ConfigError, EngineError, EngineGone
from agentrl.report.evaluation import Evaluation, MakeGroup, evaluate
from agentrl.report.observer import Observer
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.long_prompts import refuse_long_prompts
from agentrl.rollouts.settings import settings_of
from agentrl.supervision.secrets import Secrets
from agentrl.training import launch
from agentrl.training.model_folder import check_model, exported_weights, origin_of
from agentrl.types import Task
from agentrl.wrappers import load_wrappers

EVERYTHING = 10**9
MAX_SEARCHED = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions:
    """What to play, other than the config says. None: as the config says.

    Example:
        PlayOptions(model="models/tiny", samples=4)
    """

    model: str | None = None
    served_model: str | None = None
    api_key_env: str | None = None
    data: str | None = None
    target: str | None = None
    tokenizer: str | None = None
    samples: int | None = None  # of each task
    limit: int | None = None  # tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to play, and with which model.

    Example:
        options = PlayOptions(model="models/tiny", samples=4, limit=64)
        request = Request.from_options(config, options, environ=os.environ)
    """

    config: Config
    url: str | None  # of a running server; else one is started for config.model.path
    served_model: str | None  # set: `url` is an OpenAI-compatible chat endpoint that serves this name
    api_key: str | None
    api_key_env: str
    tokenizer: str  # folder or hub name
    num_tasks: int
    secrets: Secrets

    @classmethod
    def from_options(cls, config: Config, options: PlayOptions, *, environ: Mapping[str, str]) -> Request:
        """The config, overridden by the options. Raises ConfigError."""
        model = options.model
        is_url = model is not None and model.startswith(("http://", "https://"))
        _check_endpoint(options, is_url=is_url)
        if options.limit is not None and options.limit < 1:
            raise ConfigError(f"limit={options.limit}: give the number of tasks, or None for all")
        key_name = options.api_key_env or "OPENAI_API_KEY"
        tree = config.model_dump(mode="json")
        if model is not None and not is_url:
            if config.engine.urls:
                raise ConfigError(
                    f"--model {model}: the config's engine.url names a server, which serves its own model. Give "
                    "engine.url=null to start one for this model, or --model with a URL"
                )
            tree["model"] |= {"path": exported_weights(model, out_dir=config.out_dir), "warmstart": None}
        if options.data is not None:
            tree["env"]["eval_data"] = options.data
        if options.target is not None:
            tree["env"] |= {"target": options.target, "kwargs": {}}
        if options.samples is not None:
            tree["eval"]["samples_per_task"] = options.samples
        merged = parse(tree, source="eval options")
        if not is_url:
            check_model(merged, must_exist=True)
        default_tasks = EVERYTHING if options.data is not None else config.eval.num_tasks
        return cls(
            config=merged,
            url=model if is_url else None,
            served_model=options.served_model,
            api_key=environ.get(key_name),
            api_key_env=key_name,
            tokenizer=options.tokenizer or merged.model.path,
            num_tasks=options.limit or default_tasks,
            secrets=Secrets.from_environment(environ),
        )


def _check_endpoint(options: PlayOptions, *, is_url: bool) -> None:
    """Raises ConfigError where options contradict each other."""
    if options.served_model is None:
        if options.api_key_env is not None:
            raise ConfigError("--api-key-env is for a chat endpoint: name its model with --served-model")
        return
    if not is_url:
        raise ConfigError("--served-model names a model of a running server: give its URL with --model https://...")
    if options.tokenizer is not None:
        raise ConfigError("a chat endpoint takes messages: leave out --tokenizer, or --served-model")


async def play(
    request: Request, observer: Observer, *, task_id: str | None = None, max_concurrent_tasks: int | None = None
) -> Evaluation:
    """Play every task, or the one with this id. Raises AgentRLError; ConfigError before anything is started.

    Args:
        max_concurrent_tasks: None: so many that the engine is busy.
    """
    config = request.config
    env_class = load_env_class(config.env.target, config.env.kwargs)
    tasks = _tasks(env_class, request, task_id)
    async with playing(request, env_class, observer, tasks) as make_group:
        with observer.phase("playing") as advance:
            return await evaluate(
                tasks,
                make_group=make_group,
                policy_version=None,
                max_concurrent_groups=max_concurrent_tasks
                or max(1, 2 * config.engine.max_running // config.eval.samples_per_task),
                progress=advance,
            )


def _tasks(env_class: type[Env], request: Request, task_id: str | None) -> list[Task]:
    if task_id is None:
        return held_out_tasks(env_class, request.config.env, num_tasks=request.num_tasks)
    rows = islice(rows_of(env_class, "test", data=request.config.env.eval_data), MAX_SEARCHED)
    found = next((task for task in rows if task.id == task_id), None)
    if found is None:
        raise ConfigError(f"--task: {request.config.env.target} has no test task with id {task_id!r}")
    return [found]


@asynccontextmanager
async def playing(
    request: Request, env_class: type[Env], observer: Observer, tasks: Sequence[Task]
) -> AsyncIterator[MakeGroup]:
    """Start everything that playing `tasks` needs, then stop it. Yields (index, task) -> group. Raises AgentRLError."""
    config = request.config
    wrappers = load_wrappers(config.env.wrappers)
    through = _by_tokens if request.served_model is None else _by_messages
    with TemporaryDirectory(prefix="agentrl-eval-") as logs:
        async with launch.sandbox_service(config, logs=Path(logs), token=request.secrets.sandbox) as (sandbox, parts):
            with observer.phase("starting the sandbox"):
                await launch.sandbox_ready(sandbox, parts, max_restarts=config.sandbox.max_restarts)
            async with launch.watching(*parts), opened(env_class, sandbox=sandbox, wrappers=wrappers) as make_env:
                await Canaries(env_class, make_env=make_env, sandbox=sandbox).check(when="at the start")
                await rehearse(env_class, make_env, tasks[0], limit_s=config.rollout.episode_timeout_s)
                async with through(request, make_env, Path(logs), observer, tasks) as make_group:
                    yield make_group


@asynccontextmanager
async def _by_tokens(
    request: Request, make_env: Callable[[], Env], logs: Path, observer: Observer, tasks: Sequence[Task]
) -> AsyncIterator[MakeGroup]:
    """Play through an engine that exchanges token ids: the code path of training."""
    from agentrl.tokens.tokenizer import load_tokenizer

    tokenizer = await asyncio.to_thread(load_tokenizer, request.config.model, request.tokenizer)
    await refuse_long_prompts(tasks, make_env=make_env, tokenizer=tokenizer, config=request.config.rollout)
    player = GroupPlayer(make_env, settings_of(request.config), TokenRunners(tokenizer))
    async with _engine(request, logs, observer) as engine:
        yield lambda index, task: player.play_group(engine, index, task, kind="eval")


@asynccontextmanager
async def _by_messages(
    request: Request, make_env: Callable[[], Env], logs: Path, observer: Observer, tasks: Sequence[Task]
) -> AsyncIterator[MakeGroup]:
    """Play through any chat endpoint."""
    config = request.config
    assert request.url is not None and request.served_model is not None
    player = GroupPlayer(make_env, settings_of(config), EndpointRunners())
    async with ChatModel(
        request.url,
        model=request.served_model,
        api_key=request.api_key,
        api_key_name=request.api_key_env,
        request_timeout_s=config.engine.request_timeout_s,
    ) as model:
        yield lambda index, task: player.play_group(model, index, task, kind="eval")


@asynccontextmanager
async def _engine(request: Request, logs: Path, observer: Observer) -> AsyncIterator[Engine]:
    """A server started for the model folder, or the running server."""
    config = request.config
    if request.url is not None:
        async with AsyncExitStack() as stack:
            yield await _running_engine(request.url, request, stack)
        return
    origin = None if config.engine.urls else origin_of(config.model.path)
    async with launch_servers.engine_servers(
        config, model_path=config.model.path, logs=logs, token=request.secrets.engine, has_learner=False
    ) as servers:
        with observer.phase(launch_servers.start_phase(config.engine)):
            await launch_servers.engines_ready(servers, config.engine)
        async with (
            launch.watching(*launch_servers.parts_of(servers)),
            launch_servers.engine_client(
                servers, config, token=request.secrets.engine, first_version=origin.version if origin else 0
            ) as engine,
        ):
            yield engine


async def _running_engine(url: str, request: Request, stack: AsyncExitStack) -> Engine:
    """Raises EngineGone where nothing listens at `url`, ConfigError where it is not a vLLM server in RL mode."""
    timeout_s = request.config.engine.request_timeout_s
    client = VLLMEngine(url, request_timeout_s=timeout_s, token=request.secrets.engine)
    try:
        return await stack.enter_async_context(client)
    except EngineGone:
        raise
    except EngineError as error:
        raise ConfigError(
            f"{url} cannot be measured with token ids: that takes a vLLM server in RL mode, as `agentrl engine` starts "
            "it. To measure any other server through its chat endpoint, add --served-model NAME, the model that it "
            f"serves. ({error})"
        ) from error
