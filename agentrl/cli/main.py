"""The `agentrl` command: parses options, calls one function of the library, shows errors on one screen.

Exit codes: 0 done, 1 a part failed, 2 the settings or files are wrong, 130 interrupted. Each command imports the heavy
modules that it needs, so that `--help` is fast.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.cluster.command import cluster_app
from agentrl.cli.config import config as config_command
from agentrl.cli.doctor.command import doctor
from agentrl.cli.env import env_app
from agentrl.cli.export import export
from agentrl.cli.options import (
    NOTHING_LEFT,
    ApiKeyEnv,
    ConfigPath,
    Data,
    Debug,
    EvalSet,
    Latest,
    Model,
    Overrides,
    ServedModel,
    Target,
    Tokenizer,
)
from agentrl.cli.options import fail as _fail
from agentrl.cli.options import guarded as _guarded
from agentrl.cli.parsing import ConfigCommand, Group
from agentrl.cli.services import learner, orchestrator, pointing, rollout_worker, unfinished
from agentrl.cli.status import status
from agentrl.cli.view import view
from agentrl.errors import ConfigError

app = typer.Typer(
    name="agentrl",
    cls=Group,
    help="Train language models to use tools over many turns, asynchronously.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(env_app, name="env")
app.add_typer(cluster_app, name="cluster")
app.command(name="status")(status)
app.command(name="view")(view)
app.command(name="export")(export)
app.command(name="orchestrator", cls=ConfigCommand)(orchestrator)
app.command(name="learner")(learner)
app.command(name="rollout-worker")(rollout_worker)
app.command(name="doctor", cls=ConfigCommand)(doctor)
app.command(name="config", cls=ConfigCommand)(config_command)


@app.command(cls=ConfigCommand)
def train(
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG]", help="YAML file, e.g. configs/quickstart.yaml", show_default=False),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Continue this run, a folder or a name, after a crash or Ctrl-C or its end."),
    ] = None,
    latest: Latest = None,
    debug: Debug = False,
) -> None:
    """Start sandbox, engine and learner on this machine, train, write the run folder with report.html, stop them.

    `agentrl config` documents the keys of a config.
    """

    def main() -> None:
        from agentrl import api
        from agentrl import config as configs

        changes, keeping = overrides or [], pointing(latest)
        if resume is not None:
            changes = [*filter(None, [config]), *changes]
            api.train(resume=resume, overrides=changes, observer=keeping, console=True)
        elif config is None:
            raise ConfigError(
                "give a config, e.g. agentrl train configs/quickstart.yaml, or --resume with a run's folder"
            )
        elif (last := unfinished(latest, configs.load(config, changes))) is not None:
            api.train(resume=last.path, observer=keeping, console=True)
        else:
            api.train(config, changes, observer=keeping, console=True)

    _guarded(main, debug=debug)


@app.command(name="eval", cls=ConfigCommand)
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
    eval_set: EvalSet = None,
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="CONFIG is a run: measure all that it exported, and draw its curve."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure a model on held-out rows: avg@n and pass@k with 95 % confidence intervals."""

    def main() -> None:
        from agentrl import api

        if checkpoints:
            others = (model, served_model, api_key_env, data, target, tokenizer, samples, limit)
            if any(other is not None for other in others):
                raise ConfigError(
                    "--checkpoints measures what the run exported, on its own held-out sets: give only --set and keys, "
                    "such as eval.sets.new.data=ROWS"
                )
            api.evaluate_checkpoints(config_path, overrides or [], eval_set=eval_set, console=True)
            return
        api.evaluate(
            config_path,
            overrides or [],
            model=model,
            served_model=served_model,
            api_key_env=api_key_env,
            data=data,
            env=target,
            tokenizer=tokenizer,
            samples=samples,
            limit=limit,
            eval_set=eval_set,
            console=True,
        )

    _guarded(main, debug=debug, interrupted=NOTHING_LEFT)


@app.command(cls=ConfigCommand)
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
    eval_set: EvalSet = None,
    show: Annotated[bool, typer.Option("--show", help="Print the episodes, not only one line for each.")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Print token by token: logprob, policy version, whether it is trained on.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write the episodes as JSONL; nothing is overwritten.")] = None,
    debug: Debug = False,
) -> None:
    """Play episodes with a model, and read them."""

    def main() -> None:
        from agentrl import api
        from agentrl.cli.rollout import decoder, show_groups

        if tokens and served_model is not None:
            raise ConfigError(
                "--tokens: a chat endpoint does not return token ids; give a model folder or a vLLM's URL"
            )
        groups = api.rollout(
            config_path,
            overrides or [],
            model=model,
            served_model=served_model,
            api_key_env=api_key_env,
            data=data,
            env=target,
            tokenizer=tokenizer,
            samples=samples,
            limit=limit,
            task=task,
            eval_set=eval_set,
            save=save,
            console=True,
        )
        decode = decoder(config_path, overrides or [], model=model, tokenizer=tokenizer) if tokens else None
        show_groups(groups, whole=show, decode=decode)

    _guarded(main, debug=debug, interrupted=NOTHING_LEFT)


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


@app.command(cls=ConfigCommand)
def engine(config_path: ConfigPath, overrides: Overrides = None, debug: Debug = False) -> None:
    """Serve the config's model with vLLM, with the flags that in-flight weight updates need."""
    from agentrl import config as configs
    from agentrl.engine.launch_servers import serve_in_foreground
    from agentrl.supervision import secrets
    from agentrl.training.model_folder import check_model

    config = configs.load(config_path, overrides or [])
    check_model(config, must_exist=True)
    token = secrets.read(secrets.ENGINE, os.environ)
    code = _guarded(lambda: serve_in_foreground(config, token=token), debug=debug, interrupted="the engine was stopped")
    raise typer.Exit(code)


@app.command()
def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or its name; the run may still be running.")
    ],
    debug: Debug = False,
) -> None:
    """Write report.html again from the current files of a run folder."""
    from agentrl.run_folder import RunFolder
    from agentrl.view.bundle import write_report

    _guarded(lambda: typer.echo(write_report(RunFolder.open(run))), debug=debug)


def main() -> None:
    """Entry point of the console script."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that starts a process in the background does this
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    except ConfigError as error:
        _fail(error, code=2, debug="--debug" in sys.argv)
