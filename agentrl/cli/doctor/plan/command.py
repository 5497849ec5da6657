"""`agentrl doctor CONFIG --plan`: reads the options, asks the learner, makes the plan, and shows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer

from agentrl.cli.doctor.findings import Finding
from agentrl.cli.doctor.machine import read_gpus
from agentrl.cli.doctor.plan import report
from agentrl.cli.doctor.plan.ask import learner_needs, model_config_file
from agentrl.cli.doctor.plan.cards import Card, asked_cards, found_card
from agentrl.cli.doctor.plan.planning import Plan, make_plan
from agentrl.cli.doctor.plan.search import Change, nearest
from agentrl.config import Config
from agentrl.engine.gpus import visible_gpus
from agentrl.errors import ConfigError

NO_GPU = "this machine shows no GPU: say for which to plan, e.g. --gpus 8x80 (GB each) or --gpus 8xH100"


def planned(
    config: Config, *, cards: Sequence[Card], model_config: Path | None = None, mean_tokens: int | None = None
) -> tuple[Plan, tuple[Change, Plan] | None]:
    """The plan, and where it does not fit the nearest setting that does. Raises ConfigError."""
    file = model_config_file(config, model_config)
    ask = partial(learner_needs, model_config=file)
    plan = make_plan(config, ask([config])[0], cards, mean_tokens=mean_tokens)
    return plan, None if plan.fits else nearest(config, cards, ask, mean_tokens=mean_tokens)


def show_plan(
    config: Config, *, gpus: str | None, model_config: Path | None, mean_tokens: int | None, as_json: bool
) -> int:
    """Print the plan of `--gpus`, else of this machine's GPUs. Returns the exit code: 1 where it does not fit.

    Raises ConfigError.
    """
    from rich.console import Console

    cards = machine_cards() if gpus is None else asked_cards(gpus)
    if not cards:
        raise ConfigError(NO_GPU)
    plan, found = planned(config, cards=cards, model_config=model_config, mean_tokens=mean_tokens)
    if as_json:
        typer.echo(json.dumps(report.as_json(plan, found), indent=2, default=str))
    else:
        report.print_plan(plan, found, console=Console(highlight=False, soft_wrap=False))
    return int(not plan.fits)


def machine_cards() -> list[Card]:
    """The GPUs that this process may use; empty without any. Raises ConfigError where their memory is not known."""
    sizes = [gpu.total_bytes for gpu in visible_gpus().gpus]
    if None in sizes:
        raise ConfigError("nvidia-smi does not say how much memory each GPU has: say it, e.g. --gpus 1x80")
    names = {gpu.total_bytes: gpu.name for gpu in read_gpus()}
    return [found_card(names.get(size, "GPU"), size) for size in sizes if size is not None]


def plan_finding(config: Config) -> Finding:
    """The verdict for this machine as one finding. Raises ConfigError."""
    return report.finding(*planned(config, cards=machine_cards()))
