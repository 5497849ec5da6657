"""How command lines are parsed: options that are keys of the config, and a config without a command, are explained.

Independent of what any command does.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from agentrl.errors import ConfigError

SECTIONS = {"train": "train", "eval": "eval", "rollout": "eval", "engine": "engine", "warmstart": "model.warmstart"}
"""Command -> the section whose keys it reads first."""
CLOSE_TO_AN_OPTION = 0.8
ORDER = ("train", "status", "view", "report", "eval", "rollout", "env", "config", "doctor", "cluster", "warmstart")
"""How `agentrl --help` lists the commands. The others, parts of a run, follow."""


class ConfigCommand(TyperCommand):
    """A command that takes a CONFIG and KEY=VALUE overrides: `--steps 5` is refused with `train.steps=5`.

    Example:
        app.command(name="train", cls=ConfigCommand)(train)
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click.Command. Raises ConfigError for an option that means a key of the config."""
        options = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        near = SECTIONS.get(str(ctx.info_name).rpartition(" ")[2], "")
        for number, argument in enumerate(args[: args.index("--")] if "--" in args else args):
            if meant := override_for(argument, args[number + 1 :], options={*options, "--help"}, near=near):
                option = argument.partition("=")[0]
                raise ConfigError(f"there is no option {option}. {meant}")
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    """The commands, the most used first: a config in place of a command is refused with the command that trains it.

    Example:
        app = typer.Typer(name="agentrl", cls=Group)
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """See click.Group."""
        last = len(ORDER)
        return sorted(super().list_commands(ctx), key=lambda name: ORDER.index(name) if name in ORDER else last)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See click.Group. Raises ConfigError for a YAML file."""
        if args[0].endswith((".yaml", ".yml")):
            raise ConfigError(f"{args[0]} is no command; to train: agentrl train {' '.join(args)}")
        return super().resolve_command(ctx, args)


def override_for(argument: str, following: Sequence[str], *, options: set[str], near: str = "") -> str:
    """What to write instead of an unknown option; empty where it is known, misspelt, or no key of the config.

    Example:
        >>> override_for("--lr", ["1e-4"], options={"--debug"}, near="train")
        'Keys of the config are written KEY=VALUE: learner.lr=1e-4 or model.warmstart.lr=1e-4'
    """
    option, equals, value = argument.partition("=")
    name = option.lstrip("-")
    if option == name or not name[:1].isalpha() or len(name) == 1 or option in options or option[:2] in options:
        return ""
    if difflib.get_close_matches(option, options, n=1, cutoff=CLOSE_TO_AN_OPTION):
        return ""
    from agentrl.config import reference
    from agentrl.config.suggestions import suggestions

    if not equals:
        value = next((word for word in following[:1] if not word.startswith("--")), "VALUE")
    found = suggestions(name, reference.key_paths(), near=near)
    if not found:
        return ""
    return "Keys of the config are written KEY=VALUE: " + " or ".join(f"{path}={value}" for path in found)
