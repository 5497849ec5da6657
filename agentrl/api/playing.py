"""Plays held-out tasks with a model folder, a hub name or a running server, with the code of training.

`measuring.py` has the functions that users call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from agentrl.chat.chat_model import ChatModel
from agentrl.chat.runners import EndpointRunners, TokenRunners
from agentrl.check import rehearse
from agentrl.config import Config, parse
from agentrl.engine import launch_servers
from agentrl.engine.base import Engine
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.env import rows_of
from agentrl.env.canary import Canaries
from agentrl.errors import ConfigError, EngineError, EngineGone
from agentrl.report.evaluation import Evaluation, HeldOutSet, evaluate_sets
from agentrl.report.observer import Observer
from agentrl.rollouts.group import GroupPlayer, ModelT, PlayGroup
from agentrl.rollouts.long_prompts import refuse_long_prompts
from agentrl.rollouts.set_envs import MakeEnv, SetEnv, load_envs, opened_envs, players_of, tasks_of_set
from agentrl.run_folder import EpisodeKind
from agentrl.supervision.place import Place
from agentrl.supervision.secrets import Secrets
from agentrl.training import launch
from agentrl.training.model_folder import check_model, exported_weights, origin_of
from agentrl.types import Task, TrajectoryGroup

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
    eval_set: str | None = None  # the only one to play


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
    eval_set: str | None  # of the config's; None: all
    secrets: Secrets

    @classmethod
    def from_options(cls, config: Config, options: PlayOptions, *, environ: Mapping[str, str]) -> Request:
        """The config, overridden by the options. Raises ConfigError."""
        model = options.model
        is_url = model is not None and model.startswith(("http://", "https://"))
        _check_endpoint(options, is_url=is_url)
        _check_set(options, config)
        key_name = options.api_key_env or "OPENAI_API_KEY"
        tree = config.model_dump(mode="json")
        tree["eval"]["engines"] = 0  # nothing is trained meanwhile
        if model is not None and not is_url:
            if config.engine.urls:
                raise ConfigError(
                    f"--model {model}: the config's engine.url names a server, which serves its own model. Give "
                    "engine.url=null to start one for this model, or --model with a URL"
                )
            tree["model"] |= {"path": exported_weights(model, out_dir=config.out_dir), "warmstart": None}
        if options.data is not None or options.target is not None:
            tree["eval"]["sets"] = {}
        if options.data is not None:
            tree["env"]["eval_data"] = options.data
            tree["eval"]["num_tasks"] = EVERYTHING
        if options.target is not None:
            tree["env"] |= {"target": options.target, "kwargs": {}}
        for key, value in (("samples_per_task", options.samples), ("num_tasks", options.limit)):
            for section in (tree["eval"], *tree["eval"]["sets"].values()) if value is not None else ():
                section[key] = value
        merged = parse(tree, source="eval options")
        if not is_url:
            check_model(merged, must_exist=True)
        return cls(
            config=merged,
            url=model if is_url else None,
            served_model=options.served_model,
            api_key=environ.get(key_name),
            api_key_env=key_name,
            tokenizer=options.tokenizer or merged.model.path,
            eval_set=options.eval_set,
            secrets=Secrets.from_environment(environ),
        )

    def envs(self) -> dict[str, SetEnv]:
        """The environments of the sets to play, by name. Raises ConfigError."""
        loaded = load_envs(self.config)
        names = self.config.eval_sets if self.eval_set is None else [self.eval_set]
        return {name: loaded[name] for name in names}


def _check_set(options: PlayOptions, config: Config) -> None:
    """Raises ConfigError for a set that the config does not have, and for a number of tasks that is none."""
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"limit={options.limit}: give the number of tasks, or None for all")
    if (name := options.eval_set) is None:
        return
    if options.data is not None or options.target is not None:
        raise ConfigError(f"--set {name} is one of the config's eval.sets: leave out --data and --env, or --set")
    if name not in config.eval.sets:
        known = ", ".join(config.eval.sets) or "none; it has one held-out set, without a name"
        raise ConfigError(f"--set: {name!r} is not in the config's eval.sets: {known}")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """What is played of one set."""

    env: SetEnv
    tasks: list[Task]


async def play(
    request: Request, observer: Observer, *, task_id: str | None = None, max_concurrent_tasks: int | None = None
) -> Evaluation:
    """Play every task of every set.

    Raises AgentRLError; ConfigError before anything is started.

    Args:
        task_id: play only the task with this id.
        max_concurrent_tasks: play only the first set, and so many of its tasks at once. None: so many that the engine
            is busy.
    """
    envs = request.envs()
    names = list(envs) if max_concurrent_tasks is None else list(envs)[:1]
    chosen = {name: _Chosen(env=envs[name], tasks=_tasks(name, envs[name], task_id)) for name in names}
    async with _playing(request, chosen, observer) as players:
        sets = [
            HeldOutSet(
                name=name,
                tasks=one.tasks,
                num_plays=one.env.config.eval.samples_per_task,
                play_group=players[name],
            )
            for name, one in chosen.items()
        ]
        num_plays = sets[0].num_plays
        with observer.phase("playing") as advance:
            first, *others = await evaluate_sets(
                sets,
                None,
                policy_version=None,
                max_concurrent_episodes=max_concurrent_tasks * num_plays
                if max_concurrent_tasks
                else 2 * request.config.engine.max_running,
                progress=advance,
            )
    return replace(first, others=tuple(others))


def _tasks(name: str, env: SetEnv, task_id: str | None) -> list[Task]:
    config = env.config
    if task_id is None:
        return tasks_of_set(name, env)
    rows = islice(rows_of(env.env_class, "test", data=config.env.eval_data), MAX_SEARCHED)
    found = next((task for task in rows if task.id == task_id), None)
    if found is None:
        raise ConfigError(f"--task: {config.env.target} has no test task with id {task_id!r}")
    return [found]


@asynccontextmanager
async def _playing(
    request: Request, chosen: Mapping[str, _Chosen], observer: Observer
) -> AsyncIterator[Mapping[str, PlayGroup[None]]]:
    """Start everything that playing needs, then stop it. Yields who plays each set's tasks. Raises AgentRLError."""
    config = request.config
    through = _by_tokens if request.served_model is None else _by_messages
    with TemporaryDirectory(prefix="agentrl-eval-") as logs:
        async with (
            launch.place_of(config) as place,
            launch.sandbox_service(config, logs=Path(logs), token=request.secrets.sandbox, place=place) as (
                sandbox,
                parts,
            ),
        ):
            with observer.phase("starting the sandbox"):
                await launch.sandbox_ready(sandbox, parts, max_restarts=config.sandbox.max_restarts)
            envs = {name: one.env for name, one in chosen.items()}
            async with launch.watching(*parts), opened_envs(envs, sandbox=sandbox) as make_envs:
                for name, one in chosen.items():
                    env_class, make_env = one.env.env_class, make_envs[name]
                    await Canaries(env_class, make_env=make_env, sandbox=sandbox).check(when="at the start")
                    await rehearse(env_class, make_env, one.tasks[0], limit_s=config.rollout.episode_timeout_s)
                async with through(request, chosen, make_envs, Path(logs), observer, place) as players:
                    yield players


@asynccontextmanager
async def _by_tokens(
    request: Request,
    chosen: Mapping[str, _Chosen],
    make_envs: Mapping[str, MakeEnv],
    logs: Path,
    observer: Observer,
    place: Place,
) -> AsyncIterator[Mapping[str, PlayGroup[None]]]:
    """Play through an engine that exchanges token ids: the code path of training."""
    from agentrl.tokens.tokenizer import load_tokenizer

    tokenizer = await asyncio.to_thread(load_tokenizer, request.config.model, request.tokenizer)
    for name, one in chosen.items():
        config = one.env.config.rollout
        await refuse_long_prompts(one.tasks, make_env=make_envs[name], tokenizer=tokenizer, config=config)
    envs = {name: one.env for name, one in chosen.items()}
    players = players_of(envs, make_envs, TokenRunners(tokenizer))
    async with _engine(request, logs, observer, place) as engine:
        yield {name: _with_model(player, engine) for name, player in players.items()}


@asynccontextmanager
async def _by_messages(
    request: Request,
    chosen: Mapping[str, _Chosen],
    make_envs: Mapping[str, MakeEnv],
    logs: Path,
    observer: Observer,
    place: Place,
) -> AsyncIterator[Mapping[str, PlayGroup[None]]]:
    """Play through any chat endpoint."""
    assert request.url is not None and request.served_model is not None
    players = players_of({name: one.env for name, one in chosen.items()}, make_envs, EndpointRunners())
    async with ChatModel(
        request.url,
        model=request.served_model,
        api_key=request.api_key,
        api_key_name=request.api_key_env,
        request_timeout_s=request.config.engine.request_timeout_s,
    ) as model:
        yield {name: _with_model(player, model) for name, player in players.items()}


def _with_model(player: GroupPlayer[ModelT], model: ModelT) -> PlayGroup[None]:
    """The player, which needs no model any more."""

    async def play_group(_: None, group_id: int, task: Task, /, *, kind: EpisodeKind) -> TrajectoryGroup:
        return await player.play_group(model, group_id, task, kind=kind)

    return play_group


@asynccontextmanager
async def _engine(request: Request, logs: Path, observer: Observer, place: Place) -> AsyncIterator[Engine]:
    """A server started for the model folder, or the running server."""
    config = request.config
    if request.url is not None:
        async with AsyncExitStack() as stack:
            yield await _running_engine(request.url, request, stack)
        return
    origin = None if config.engine.urls else origin_of(config.model.path)
    token = request.secrets.for_place(config.place).engine
    async with launch_servers.engine_servers(
        config, model_path=config.model.path, logs=logs, token=token, has_learner=False, place=place
    ) as servers:
        with observer.phase(launch_servers.start_phase(config.engine)):
            await launch_servers.engines_ready(servers, config.engine)
        async with (
            launch.watching(*launch_servers.parts_of(servers)),
            launch_servers.engine_client(
                servers, config, token=token, first_version=origin.version if origin else 0
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
