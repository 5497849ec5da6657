"""`agentrl rollout`: its options, laid over a config as those of `agentrl eval` are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import (
    ApiKeyEnv,
    ConfigPath,
    Data,
    Debug,
    Model,
    Overrides,
    ServedModel,
    Target,
    Tokenizer,
    run,
)


def rollout(
    config_path: ConfigPath,
    overrides: Overrides = None,
    model: Model = None,
    served_model: ServedModel = None,
    api_key_env: ApiKeyEnv = None,
    data: Data = None,
    target: Target = None,
    tokenizer: Tokenizer = None,
    samples: Annotated[int, typer.Option("-n", "--n", min=1, help="Episodes of each task.")] = 4,
    task: Annotated[str | None, typer.Option(help="Id of the test task; default: the first.")] = None,
    limit: Annotated[int, typer.Option("--tasks", min=1, help="Play the first so many tasks.")] = 1,
    show: Annotated[bool, typer.Option("--show", help="Print the episodes, not only a line of each.")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Print token by token: logprob, policy version, what is trained on.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write the episodes as JSONL; nothing is overwritten.")] = None,
    debug: Debug = False,
) -> None:
    """Play episodes with a model, and read them."""
    from agentrl import config as configs
    from agentrl.cli.evaluate import Request
    from agentrl.cli.sample import Sample, sample_episodes

    config = configs.load(config_path, overrides or [])
    request = Request.from_options(
        config,
        model=model,
        data=data,
        target=target,
        tokenizer=tokenizer,
        samples=samples,
        limit=limit,
        served_model=served_model,
        api_key_env=api_key_env,
        environ=os.environ,
    )
    wanted = Sample(request=request, task_id=task, show=show, tokens=tokens, save=save)
    run(sample_episodes(wanted), debug=debug, interrupted="every part was stopped")
