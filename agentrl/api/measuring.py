"""`agentrl.evaluate` and `agentrl.rollout`: a model plays held-out tasks. Statistics of the episodes, or they alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentrl import config as configs
from agentrl.api.blocking import blocking
from agentrl.api.playing import PlayOptions, Request, play
from agentrl.config import Config, ConfigSource, Overrides
from agentrl.errors import ConfigError
from agentrl.report.console import EvalConsole
from agentrl.report.evaluation import Evaluation
from agentrl.report.observer import Observer, Observers
from agentrl.run_folder import to_lines
from agentrl.types import TrajectoryGroup

MAX_CONCURRENT_TASKS = 64  # of a rollout, which starts few of them


def evaluate(
    config: ConfigSource,
    overrides: Overrides = (),
    *,
    model: str | Path | None = None,
    served_model: str | None = None,
    api_key_env: str | None = None,
    data: str | Path | None = None,
    env: str | None = None,
    tokenizer: str | Path | None = None,
    samples: int | None = None,
    limit: int | None = None,
    eval_set: str | None = None,
    observer: Observer | None = None,
    console: bool = False,
) -> Evaluation:
    """Measure a model on held-out tasks, like `agentrl eval`: avg@n and pass@k with 95 % intervals over tasks.

    Args:
        config: path of a YAML or JSON file, nested dict, or Config.
        overrides: `["learner.lr=1e-4"]` or `{"learner.lr": 1e-4}`.
        model: folder, hub name, or URL of a running server; None: the config's `model.path`.
        served_model: `model` is the URL of any OpenAI-compatible chat endpoint (.../v1) that serves this name.
        api_key_env: environment variable with the endpoint's key; None: OPENAI_API_KEY.
        data: rows: a file, a set's name, hf:owner/name; None: the config's `eval.sets`, or its `env.eval_data`.
        env: another environment, `module:Class` or `path/to/file.py:Class`.
        tokenizer: its folder, where `model` is the URL of a vLLM server.
        samples: of each task; None: the config's `eval.samples_per_task`.
        limit: number of tasks of each set; None: all rows of `data`, else as the config says.
        eval_set: the only one of the config's `eval.sets` to measure; None: all. The result has the first, and
            `others` the rest.
        observer: is told of phases and progress, and the result.
        console: print them.

    Raises ConfigError, DataError or EnvError before anything is started, another AgentRLError where a part fails, and
    KeyboardInterrupt after Ctrl-C, once every part has stopped.

    Example:
        measured = agentrl.evaluate("configs/quickstart.yaml", model=result.checkpoint, samples=8)
        measured.result.avg, measured.result.avg_low, measured.result.avg_high
        measured.groups[0].episodes[0].reward
    """
    request = _request(
        configs.load(config, overrides),
        model=model,
        served_model=served_model,
        api_key_env=api_key_env,
        data=data,
        target=env,
        tokenizer=tokenizer,
        samples=samples,
        limit=limit,
        eval_set=eval_set,
    )
    with Observers(EvalConsole() if console else None, observer) as watch:
        measured = blocking(play(request, watch))
        for one in (measured, *measured.others):
            watch.evaluated(one.result)
    return measured


def rollout(
    config: ConfigSource,
    overrides: Overrides = (),
    *,
    model: str | Path | None = None,
    served_model: str | None = None,
    api_key_env: str | None = None,
    data: str | Path | None = None,
    env: str | None = None,
    tokenizer: str | Path | None = None,
    samples: int = 4,
    limit: int = 1,
    task: str | None = None,
    eval_set: str | None = None,
    save: str | Path | None = None,
    observer: Observer | None = None,
    console: bool = False,
) -> tuple[TrajectoryGroup, ...]:
    """Play episodes with a model, like `agentrl rollout`. One group of `samples` episodes for each task.

    Args:
        samples: episodes of each task.
        limit: number of tasks, from the first.
        task: id of the only task to play.
        eval_set: the one of the config's `eval.sets` to play; None: the first.
        save: file to write the episodes into, JSON lines as in a run's trajectories; nothing is overwritten.

    The other arguments and the errors are those of `evaluate`.

    Example:
        (group,) = agentrl.rollout("configs/quickstart.yaml", model="models/tiny", samples=2)
        for episode in group.episodes:
            print(episode.reward, episode.segments[0].messages[-1].content)
    """
    request = _request(
        configs.load(config, overrides),
        model=model,
        served_model=served_model,
        api_key_env=api_key_env,
        data=data,
        target=env,
        tokenizer=tokenizer,
        samples=samples,
        limit=limit,
        eval_set=eval_set,
    )
    target = None if save is None else Path(save)
    if target is not None and target.exists():
        raise ConfigError(f"--save: {target} exists already; nothing is overwritten")
    with Observers(EvalConsole() if console else None, observer) as watch:
        played = blocking(play(request, watch, task_id=task, max_concurrent_tasks=MAX_CONCURRENT_TASKS))
    if target is not None:
        _save(target, played.groups)
    return played.groups


def _request(config: Config, **options: Any) -> Request:
    """What to play; a Path is a text there. Raises ConfigError."""
    texts: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return Request.from_options(config, PlayOptions(**texts), environ=os.environ)


def _save(path: Path, groups: Sequence[TrajectoryGroup]) -> None:
    """Write the episodes in the format of a run's trajectories. Raises ConfigError."""
    encoder = msgspec.json.Encoder()
    lines = [encoder.encode(line) for group in groups for line in to_lines(group)]
    try:
        with path.open("xb") as file:
            file.write(b"".join(line + b"\n" for line in lines))
    except OSError as error:
        raise ConfigError(f"--save: cannot write {path}: {error.strerror}") from error
