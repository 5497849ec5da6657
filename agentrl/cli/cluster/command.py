"""`agentrl cluster render slurm|kuberay CONFIG`: the file that starts the run of a config on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import ConfigPath, Debug, Overrides, guarded
from agentrl.cli.parsing import ConfigCommand, Group
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.cli.cluster.resources import Asked, Nodes
    from agentrl.config import Config


class RenderGroup(Group):
    """The systems: a config in place of one is refused with what to write.

    Example:
        typer.Typer(cls=RenderGroup)
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See Group. Raises ConfigError for a YAML file."""
        if args[0].endswith((".yaml", ".yml")):
            raise ConfigError(f"write the system first: agentrl cluster render slurm {args[0]}, or kuberay")
        return super().resolve_command(ctx, args)


render_app = typer.Typer(cls=RenderGroup, help="Write the file that starts a run.", no_args_is_help=True)
cluster_app = typer.Typer(cls=Group, help="Several machines: write the file that starts a run.", no_args_is_help=True)
cluster_app.add_typer(render_app, name="render")

NumNodes = Annotated[int | None, typer.Option("--nodes", min=1, help="Default: as few as have room for all parts.")]
Gpus = Annotated[int | None, typer.Option("--gpus-per-node", min=0, help="Default: those of all parts, at most 8.")]
Cpus = Annotated[
    int | None,
    typer.Option("--cpus-per-node", min=1, help="Default: those of its parts, and one for the orchestrator."),
]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="A new file; default: standard output.")]


@render_app.command(cls=ConfigCommand)
def slurm(
    config_path: ConfigPath,
    overrides: Overrides = None,
    nodes: NumNodes = None,
    gpus_per_node: Gpus = None,
    cpus_per_node: Cpus = None,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Write the batch script that runs `agentrl train CONFIG place=ray` under Slurm, by `ray symmetric-run`."""

    def text() -> str:
        from agentrl.cli.cluster.slurm import script

        config, asked = _asked(config_path, overrides or [])
        size = _nodes(asked, nodes, gpus_per_node, cpus_per_node)
        changes = [change for change in overrides or [] if not change.startswith("place=")]
        link = Path(config.out_dir) / f"{config.name}-latest"
        command = ["python3", "-m", "agentrl", "train", str(config_path), *changes, "place=ray", "--latest", str(link)]
        return script(config, command, asked=asked, nodes=size)

    _write(text, out, debug=debug)


@render_app.command(cls=ConfigCommand)
def kuberay(
    config_path: ConfigPath,
    overrides: Overrides = None,
    image: Annotated[str, typer.Option(help="Of all pods, with agentrl and ray[default].", show_default=False)] = "",
    claim: Annotated[str, typer.Option(help="A PersistentVolumeClaim that many pods can write.")] = "agentrl",
    mount: Annotated[str, typer.Option(help="Where the pods see it.")] = "/shared",
    memory: Annotated[str | None, typer.Option(help="Of a pod with parts, e.g. 64Gi; default: no limit.")] = None,
    nodes: NumNodes = None,
    gpus_per_node: Gpus = None,
    cpus_per_node: Cpus = None,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Write the RayJob that runs the config on Kubernetes, by the KubeRay operator."""

    def text() -> str:
        from agentrl.cli.cluster.kuberay import Pods, manifest

        if not image:
            raise ConfigError(
                "name the image of the pods, which has agentrl and ray[default]: --image REGISTRY/NAME:TAG"
            )
        config, asked = _asked(config_path, overrides or [])
        asked = [one for one in asked if one.part != "sandbox"]  # it has a pod of its own
        size = _nodes(asked, nodes, gpus_per_node, cpus_per_node)
        return manifest(
            config, asked=asked, nodes=size, pods=Pods(image=image, claim=claim, mount=mount, memory=memory)
        )

    _write(text, out, debug=debug)


def _asked(path: Path, overrides: Sequence[str]) -> tuple[Config, list[Asked]]:
    """The config with place=ray, and what its parts ask for. Raises ConfigError, MissingDependencyError."""
    from agentrl import config as configs
    from agentrl.cli.cluster.resources import asked_of

    config = configs.load(path, [*overrides, "place=ray"])
    if config.ray.address is not None:
        raise ConfigError(
            f"ray.address={config.ray.address}: the rendered file starts a cluster of its own. Leave it out, or join "
            "that cluster with `agentrl train`"
        )
    return config, asked_of(config)


def _nodes(asked: Sequence[Asked], count: int | None, gpus: int | None, cpus: int | None) -> Nodes:
    from agentrl.cli.cluster.resources import NodeSize, nodes_for

    return nodes_for(asked, NodeSize(cpus=cpus, gpus=gpus), count=count)


def _write(text: Callable[[], str], out: Path | None, *, debug: bool) -> None:
    """Write the text to a new file, or to standard output."""

    def write() -> None:
        if out is None:
            typer.echo(text(), nl=False)
            return
        if out.exists():
            raise ConfigError(f"--out {out} exists: remove it, or name another file")
        whole = text()
        try:
            out.write_text(whole)
        except OSError as error:
            raise ConfigError(f"--out: cannot write {out}: {error.strerror}") from error
        typer.echo(f"{out} was written", err=True)

    guarded(write, debug=debug)
