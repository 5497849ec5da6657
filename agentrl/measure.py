"""`agentrl eval`: any model folder, hub name or running server, on held-out rows, with the rollout's own code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_urlsafe
from tempfile import TemporaryDirectory

from agentrl import launch
from agentrl.config import Config, parse
from agentrl.console import EvalConsole
from agentrl.engine import Engine
from agentrl.env import load_env_class
from agentrl.evaluate import Evaluation, evaluate
from agentrl.openai_engine import OpenAIEngine
from agentrl.player import Player
from agentrl.source import held_out_tasks
from agentrl.train import check_model

EVERYTHING = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure."""

    config: Config
    url: str | None  # of a running server; else one is started for config.model.path
    tokenizer: str
    num_tasks: int

    @classmethod
    def from_options(
        cls,
        config: Config,
        *,
        model: str | None,
        data: Path | None,
        target: str | None,
        tokenizer: str | None,
        samples: int | None,
        limit: int | None,
    ) -> Request:
        """The command line's options laid over the config. Raises ConfigError."""
        is_url = model is not None and model.startswith(("http://", "https://"))
        tree = config.model_dump(mode="json")
        if model is not None and not is_url:
            tree["model"] |= {"path": model, "warmstart": None}
        if data is not None:
            tree["env"]["eval_data"] = str(data)
        if target is not None:
            tree["env"]["target"] = target
        if samples is not None:
            tree["eval"]["samples_per_task"] = samples
        laid_over = parse(tree, source="eval options")
        if not is_url:
            check_model(parse(tree | {"model": tree["model"] | {"warmstart": None}}, source="eval options"))
        default_tasks = EVERYTHING if data is not None else config.eval.num_tasks
        return cls(
            config=laid_over,
            url=model if is_url else None,
            tokenizer=tokenizer or laid_over.model.path,
            num_tasks=limit or default_tasks,
        )


async def measure(request: Request) -> Evaluation:
    """Play every task and show the numbers. Raises AgentRLError."""
    from agentrl.renderer import TurnTokenizer

    config = request.config
    env_class = load_env_class(config.env.target)
    tasks = held_out_tasks(env_class, config.env, num_tasks=request.num_tasks)
    console = EvalConsole()
    with TemporaryDirectory(prefix="agentrl-eval-") as logs:
        token = token_urlsafe(16)
        async with launch.sandbox_service(config, logs=Path(logs), token=token) as (sandbox, parts):
            with console.phase("starting the sandbox"):
                await launch.sandbox_ready(sandbox, parts)
            tokenizer = await asyncio.to_thread(TurnTokenizer.load, request.tokenizer)
            player = Player(config, env_class=env_class, tokenizer=tokenizer, sandbox=sandbox)
            async with launch.watching(*parts), _engine(request, Path(logs), console) as engine:
                with console.progress("playing") as advance:
                    evaluation = await evaluate(
                        tasks,
                        make_group=lambda index, task: player.play_group(engine, index, task, kind="eval"),
                        policy_version=0,
                        max_concurrent_groups=max(1, 2 * config.engine.max_num_seqs // config.eval.samples_per_task),
                        progress=advance,
                    )
    console.result(evaluation.result)
    return evaluation


@asynccontextmanager
async def _engine(request: Request, logs: Path, console: EvalConsole) -> AsyncIterator[Engine]:
    """A server started for the model folder, or the running one."""
    config = request.config
    if request.url is not None:
        async with OpenAIEngine(request.url, request_timeout_s=config.engine.request_timeout_s) as running:
            yield running
        return
    async with launch.engine_process(config, model_path=config.model.path, logs=logs) as (url, parts):
        with console.phase("starting the engine (vLLM)"):
            await launch.engine_ready(url, config.engine, parts)
        async with launch.watching(*parts), launch.engine_client(url, config, parts) as engine:
            yield engine
