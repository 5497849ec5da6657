"""The `agentrl` command: parses options, calls one function of the library, shows errors on one screen.

Exit codes: 0 done, 1 a part failed, 2 the settings or files are wrong, 130 interrupted. Each command imports the heavy
modules that it needs, so that `--help` is fast.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.config import config as config_command
from agentrl.cli.doctor.command import doctor
from agentrl.cli.env import env_app
from agentrl.cli.options import (
    ApiKeyEnv,
    ConfigPath,
    Data,
    Debug,
    Latest,
    Model,
    Overrides,
    PlayOptions,
    ServedModel,
    Target,
    Tokenizer,
)
from agentrl.cli.options import fail as _fail
from agentrl.cli.options import guarded as _guarded
from agentrl.cli.options import run as _run
from agentrl.cli.services import learner, orchestrator, point, unfinished
from agentrl.cli.status import status
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.run_folder import RunFolder

app = typer.Typer(
    name="agentrl",
    help="Train language models to use tools over many turns, asynchronously.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(env_app, name="env")
app.command(name="status")(status)
app.command(name="orchestrator")(orchestrator)
app.command(name="learner")(learner)
app.command(name="doctor")(doctor)
app.command(name="config")(config_command)


@app.command()
def train(
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG]", help="YAML file, e.g. configs/quickstart.yaml", show_default=False),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Continue the run in this folder, after a crash, Ctrl-C or its last step."),
    ] = None,
    latest: Latest = None,
    debug: Debug = False,
) -> None:
    """Start sandbox, engine and learner on this machine, train, write the run folder with report.html, stop them.

    `agentrl config` documents the keys of a config.
    """

    def main() -> None:
        loaded, run = _new_or_resumed(config, overrides or [], resume, latest)
        _run(_train(loaded, run, latest), debug=debug)

    _guarded(main, debug=debug)


def _new_or_resumed(
    config: str | None, overrides: list[str], resume: Path | None, latest: Path | None
) -> tuple[Config, RunFolder | None]:
    from agentrl import config as configs
    from agentrl.training.resume import reopen

    if resume is not None:
        run, resumed = reopen(resume, [*filter(None, [config]), *overrides])
        return resumed, run
    if config is None:
        raise ConfigError("give a config, e.g. agentrl train configs/quickstart.yaml, or --resume with a run's folder")
    loaded = configs.load(config, overrides)
    return loaded, unfinished(latest, loaded)


async def _train(config: Config, resumed: RunFolder | None, latest: Path | None) -> None:
    from agentrl.report.console import TrainConsole
    from agentrl.run_folder import RunFolder
    from agentrl.supervision.secrets import Secrets
    from agentrl.training.run import Training, train

    console = TrainConsole(total_steps=config.train.steps)
    training = Training(config, console, secrets=Secrets.from_environment(os.environ))
    run = resumed or RunFolder.create(config.out_dir, config.name, config=config)
    if latest is not None:
        point(latest, run.path)
    await train(training, run, console)


@app.command(name="eval")
def evaluate(
    config_path: ConfigPath,
    overrides: Overrides = None,
    model: Model = None,
    served_model: ServedModel = None,
    api_key_env: ApiKeyEnv = None,
    data: Data = None,
    target: Target = None,
    tokenizer: Tokenizer = None,
    samples: Annotated[int | None, typer.Option("-n", min=1, help="Samples of each task.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    debug: Debug = False,
) -> None:
    """Measure a model on held-out rows: avg@n and pass@k with 95 % confidence intervals."""
    from agentrl import config as configs
    from agentrl.cli.evaluate import Request, measure

    config = configs.load(config_path, overrides or [])
    options = PlayOptions(
        model=model,
        served_model=served_model,
        api_key_env=api_key_env,
        data=data,
        target=target,
        tokenizer=tokenizer,
        samples=samples,
        limit=limit,
    )
    request = Request.from_options(config, options, environ=os.environ)
    _run(measure(request), debug=debug)


@app.command()
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
    limit: Annotated[int, typer.Option("--tasks", min=1, help="Play this many tasks.")] = 1,
    show: Annotated[bool, typer.Option("--show", help="Print the episodes, not only one line for each.")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Print token by token: logprob, policy version, whether it is trained on.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write the episodes as JSONL; nothing is overwritten.")] = None,
    debug: Debug = False,
) -> None:
    """Play episodes with a model, and read them."""
    from agentrl import config as configs
    from agentrl.cli.evaluate import Request
    from agentrl.cli.rollout import Sample, sample_episodes

    config = configs.load(config_path, overrides or [])
    options = PlayOptions(
        model=model,
        served_model=served_model,
        api_key_env=api_key_env,
        data=data,
        target=target,
        tokenizer=tokenizer,
        samples=samples,
        limit=limit,
    )
    request = Request.from_options(config, options, environ=os.environ)
    wanted = Sample(request=request, task_id=task, show=show, tokens=tokens, save=save)
    _run(sample_episodes(wanted), debug=debug, interrupted="every part was stopped")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def warmstart(context: typer.Context) -> None:
    """Make a small model from demonstrations (`agentrl warmstart --help` lists its options)."""
    from agentrl.supervision.child import module_command

    os.execv(sys.executable, [*module_command("trainer.warmstart"), *context.args])


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def sandbox(context: typer.Context) -> None:
    """Serve the sandbox that runs model-written code (`agentrl sandbox --help` lists its options)."""
    from agentrl.supervision.child import module_command

    os.execv(sys.executable, [*module_command("sandbox"), *context.args])


@app.command()
def engine(config_path: ConfigPath, overrides: Overrides = None, debug: Debug = False) -> None:
    """Serve the config's model with vLLM, with the flags that in-flight weight updates need."""
    from agentrl import config as configs
    from agentrl.engine.launch_servers import replace_by_engine
    from agentrl.supervision import secrets
    from agentrl.training.model_folder import check_model, is_model_folder

    config = configs.load(config_path, overrides or [])
    check_model(config)
    if config.model.warmstart is not None and not is_model_folder(Path(config.model.path)):
        raise ConfigError(
            f"model.path: there is no {config.model.path} yet: run `agentrl warmstart {config_path}` first"
        )
    _guarded(lambda: replace_by_engine(config, token=secrets.read(secrets.ENGINE, os.environ)), debug=debug)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder, e.g. runs/quickstart; the run may still be running.")],
    debug: Debug = False,
) -> None:
    """Write report.html again from the current files of a run folder."""
    from agentrl.report.page import write_report
    from agentrl.run_folder import RunFolder

    _guarded(lambda: typer.echo(write_report(RunFolder.open(run))), debug=debug)


def main() -> None:
    """Entry point of the console script."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except ConfigError as error:
        _fail(error, code=2, debug="--debug" in sys.argv)
