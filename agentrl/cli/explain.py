"""`agentrl explain`: prints the documentation of the config's keys, from the config's own source.

Adds the names that are registered outside the config: environments and wrappers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import Debug, guarded

if TYPE_CHECKING:
    from agentrl.config.reference import Key, Known

WIDTH = 100


def explain(
    key: Annotated[str, typer.Argument(help="e.g. algorithm or algorithm.treatment; default: all.")] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="The whole docs/configuration.md.")] = False,
    debug: Debug = False,
) -> None:
    """Print what a key of the config means: type, default, choices; of a section all its keys."""

    def text() -> str:
        from agentrl.config import reference

        known = registered_names()
        return reference.markdown(known) if markdown else "\n".join(_lines(*reference.find(key, known))) + "\n"

    typer.echo(guarded(text, debug=debug), nl=False)


def registered_names() -> Known:
    """What the registries of environments and wrappers hold, by the key that takes their names."""
    from agentrl.env import specs
    from agentrl.env.entry_points import adapter_summaries
    from agentrl.env.registry import summary
    from agentrl.wrappers import WRAPPERS

    return {
        "env.target": {spec.id: summary(spec.load()) for spec in specs()} | adapter_summaries(),
        "env.wrappers": {name: summary(wrapper) for name, wrapper in WRAPPERS.items()},
    }


def _lines(key: Key, keys: list[Key]) -> Iterator[str]:
    yield from _entry(key) if key.path else ()
    if keys:
        yield from ("", "keys:") if key.path else ("Sections and keys of a config; `agentrl explain KEY` says more.",)
    for inner in keys:
        yield ""
        yield from textwrap.indent("\n".join(_entry(inner, with_choices=not key.path)), "  ").splitlines()


def _entry(key: Key, *, with_choices: bool = True) -> Iterator[str]:
    """Path, type and default on a line, then the documentation, then the choices."""
    default = f"default {key.default}" if key.default is not None else "" if key.section else "required"
    yield f"{key.path}: " + ", ".join(filter(None, (key.kind, default)))
    yield from textwrap.indent(textwrap.fill(key.doc, WIDTH - 6), "    ").splitlines()
    width = max(map(len, key.choices), default=0)
    for name, line in key.choices.items() if with_choices else ():
        text = textwrap.fill(line, WIDTH - width - 10)
        yield f"      {name:<{width}}  " + text.replace("\n", "\n" + " " * (width + 8))
