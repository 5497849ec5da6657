"""`agentrl orchestrator`, `learner` and `rollout-worker`: parts of a run that another program starts and watches.

The other parts are `agentrl sandbox` and `agentrl engine`. Reads the secrets from the environment; nothing below does.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from agentrl.cli import options
from agentrl.cli.options import ConfigPath, Debug, Latest, Overrides
from agentrl.errors import ConfigError
from agentrl.supervision import secrets

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.report.observer import Observer
    from agentrl.run_folder import RunFolder


def orchestrator(
    config_path: ConfigPath,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address that the learner connects to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8400,
    latest: Latest = None,
    debug: Debug = False,
) -> None:
    """Play episodes and serve batches to a learner that is started separately. Both need the same AGENTRL_TOKEN."""
    options.guarded(
        lambda: _orchestrate(config_path, overrides or [], at=(host, port), latest=latest, debug=debug), debug=debug
    )


def learner(
    config_path: Annotated[
        Path, typer.Argument(metavar="RUN/config.json", help="The config of the orchestrator's run.")
    ],
    orchestrator_url: Annotated[str, typer.Option("--orchestrator", metavar="URL")] = "http://127.0.0.1:8400",
    weights_dir: Annotated[
        Path | None, typer.Option(help="Folder that the engines see under the same name; default RUN/weights.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train for an orchestrator on all ranks of the config, from the run's newest checkpoint if any."""
    options.guarded(lambda: _learn(config_path, orchestrator_url, weights_dir), debug=debug)


def rollout_worker(
    orchestrator_url: Annotated[
        str, typer.Option("--orchestrator", metavar="URL", help="The address that rollout.worker_listen gives.")
    ],
    name: Annotated[str | None, typer.Option(help="Unique in the run; default: this machine and process.")] = None,
    stacks: Annotated[
        Path, typer.Option(metavar="FILE", help="For the stacks of all threads where code blocks the event loop.")
    ] = Path("rollout-worker-stacks.txt"),
    debug: Debug = False,
) -> None:
    """Play episodes for a run on another machine, until it is over. Both need the same AGENTRL_TOKEN."""
    work = _play_for(orchestrator_url, name or f"{socket.gethostname()}-{os.getpid()}", stacks)
    options.run(work, debug=debug, interrupted="its groups are played by other workers")


async def _play_for(orchestrator_url: str, name: str, stacks: Path) -> None:
    from agentrl.workers.worker import work

    if secrets.read(secrets.RUN, os.environ) is None:
        raise ConfigError(f"set {secrets.RUN} (or {secrets.RUN}_FILE), the same for orchestrator and rollout workers")
    await work(orchestrator_url, secrets.Secrets.from_environment(os.environ), name=name, stacks=stacks)


def _orchestrate(
    config_path: Path, overrides: list[str], *, at: tuple[str, int], latest: Path | None, debug: bool
) -> None:
    from agentrl import config as configs
    from agentrl.report.console import TrainConsole
    from agentrl.run_folder import RunFolder
    from agentrl.training.run import Training, train

    if secrets.read(secrets.RUN, os.environ) is None:
        raise ConfigError(f"set {secrets.RUN} (or {secrets.RUN}_FILE), the same for orchestrator and learner")
    config = configs.load(config_path, overrides)
    console = TrainConsole(total_steps=config.train.steps)
    training = Training(config, console, secrets=secrets.Secrets.from_environment(os.environ), learner_at=at)
    run = unfinished(latest, config) or RunFolder.create(config.out_dir, config.name, config=config)
    if latest is not None:
        point(latest, run.path)
    options.run(train(training, run, console), debug=debug)


def unfinished(latest: Path | None, config: Config) -> RunFolder | None:
    """The run that `latest` leads to, if it has this config and is not over. Prints why not otherwise."""
    from agentrl.run_folder import RunFolder
    from agentrl.training import resume

    if latest is None or not (latest / "config.json").is_file():
        return None
    run = RunFolder.open(latest.resolve())
    try:
        resume.apply_config(run, config)
    except resume.CannotResume as error:
        typer.echo(f"starting a new run, since the last one cannot continue: {error}")
        return None
    typer.echo(f"{run.path.name} continues")
    return run


def pointing(latest: Path | None) -> Observer | None:
    """Points the link to the run's folder as soon as there is one; None without a link."""
    from agentrl.report.observer import Observer

    class Pointing(Observer):
        """Of `--latest`."""

        def run_folder(self, path: Path) -> None:
            """See Observer."""
            assert latest is not None
            point(latest, path)

    return None if latest is None else Pointing()


def point(link: Path, folder: Path) -> None:
    """Point `link` to `folder` in one step. It is relative, so that it works where both are mounted elsewhere."""
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(os.path.relpath(folder, link.parent))
        fresh.replace(link)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise ConfigError(f"--latest: cannot make the link {link}: {error.strerror}") from error


def _learn(config_path: Path, orchestrator_url: str, weights_dir: Path | None) -> NoReturn:
    from agentrl import config as configs
    from agentrl.training import launch

    token = secrets.read(secrets.RUN, os.environ)
    if token is None:
        raise ConfigError(f"set {secrets.RUN} (or {secrets.RUN}_FILE), the same for orchestrator and learner")
    config = configs.load(config_path)
    run_dir = config_path.resolve().parent
    command = launch.learner_command(
        config,
        config_path=run_dir / config_path.name,
        orchestrator_url=orchestrator_url,
        weights_dir=weights_dir or run_dir / "weights",
        run_dir=run_dir,
        token_file=Path(path) if (path := os.environ.get(f"{secrets.RUN}_FILE")) else None,
    )
    added = {secrets.RUN: token, **launch.learner_environment(config)}
    os.execvpe(command[0], command, {**os.environ, **added})
