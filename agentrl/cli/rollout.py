"""`agentrl rollout`: plays a few episodes with a model, as `agentrl eval` does, then prints or saves them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
from rich.console import Console

from agentrl.cli.evaluate import Request, playing
from agentrl.data.source import held_out_tasks
from agentrl.env import Env, load_env_class
from agentrl.errors import ConfigError
from agentrl.report.console import EvalConsole
from agentrl.report.episode_text import show_episode, show_tokens, summary
from agentrl.report.evaluation import evaluate
from agentrl.run_folder import to_lines
from agentrl.types import Task, TrajectoryGroup

MAX_CONCURRENT_TASKS = 64
MAX_SEARCHED = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What to play, and what to do with the episodes.

    Example:
        Sample(request=request, task_id=None, show=True, tokens=False, save=Path("episodes.jsonl"))
    """

    request: Request
    task_id: str | None  # None: the first tasks
    show: bool
    tokens: bool
    save: Path | None


async def sample_episodes(wanted: Sample) -> tuple[TrajectoryGroup, ...]:
    """Play, print, save. Raises AgentRLError; ConfigError before anything is started."""
    request = wanted.request
    if wanted.tokens and request.served_model is not None:
        raise ConfigError("--tokens: a chat endpoint does not return token ids; give a model folder or a vLLM's URL")
    if wanted.save is not None and wanted.save.exists():
        raise ConfigError(f"--save: {wanted.save} exists already; nothing is overwritten")
    env_class = load_env_class(request.config.env.target, request.config.env.kwargs)
    tasks = _tasks(env_class, request, wanted.task_id)
    terminal = EvalConsole()
    async with playing(request, env_class, terminal) as make_group:
        with terminal.progress("playing") as advance:
            done = await evaluate(
                tasks,
                make_group=make_group,
                policy_version=0,
                max_concurrent_groups=MAX_CONCURRENT_TASKS,
                progress=advance,
            )
    if wanted.save is not None:
        _save(wanted.save, done.groups)
    decode = await asyncio.to_thread(_decoder, request) if wanted.tokens else None
    _show(done.groups, whole=wanted.show, decode=decode)
    return done.groups


def _tasks(env_class: type[Env], request: Request, task_id: str | None) -> list[Task]:
    if task_id is None:
        return held_out_tasks(env_class, request.config.env, num_tasks=request.num_tasks)
    rows = islice(env_class.tasks("test", data=request.config.env.eval_data), MAX_SEARCHED)
    found = next((task for task in rows if task.id == task_id), None)
    if found is None:
        raise ConfigError(f"--task: {request.config.env.target} has no test task with id {task_id!r}")
    return [found]


def _decoder(request: Request) -> Callable[[Sequence[int]], str]:
    from agentrl.tokens.tokenizer import load_tokenizer

    return load_tokenizer(request.config.model, request.tokenizer).decode


def _show(groups: Sequence[TrajectoryGroup], *, whole: bool, decode: Callable[[Sequence[int]], str] | None) -> None:
    console = Console(highlight=False)
    for group in groups:
        for episode in group.episodes:
            if whole:
                show_episode(console, group.task, episode)
            if decode is not None:
                show_tokens(console, episode, decode)
            if not whole and decode is None:
                console.print(summary(episode, answer=group.task.answer))


def _save(path: Path, groups: Sequence[TrajectoryGroup]) -> None:
    """Write the episodes in the format of a run's trajectories. Raises ConfigError."""
    encoder = msgspec.json.Encoder()
    lines = [encoder.encode(line) for group in groups for line in to_lines(group)]
    try:
        with path.open("xb") as file:
            file.write(b"".join(line + b"\n" for line in lines))
    except OSError as error:
        raise ConfigError(f"--save: cannot write {path}: {error.strerror}") from error
