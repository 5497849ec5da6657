"""`agentrl config`: shows a config with every default filled in, and documents its keys from the config's own source.

Adds the names that are registered outside the config: environments and wrappers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import Debug, Overrides, guarded
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config.reference import Key, Known

WIDTH = 100


def config(
    path: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="YAML file to show with all its keys.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    describe: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Document a key or a section: algorithm, algorithm.treatment."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/config.md.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a config, for editors.")] = False,
    debug: Debug = False,
) -> None:
    """List the sections and keys of a config. With CONFIG: print it as YAML, with overrides and defaults filled in."""

    def text() -> str:
        asked = [bool(path), describe is not None, markdown, schema]
        if sum(asked) > 1:
            raise ConfigError("give one of CONFIG, --describe KEY, --markdown and --schema")
        return resolved(path, overrides or []) if path else documentation(describe or "", markdown, schema)

    typer.echo(guarded(text, debug=debug), nl=False)


def resolved(path: str, overrides: list[str]) -> str:
    """The config in the file as YAML: overrides applied, defaults filled in. Raises ConfigError."""
    import yaml

    from agentrl import config as configs
    from agentrl.config import reference

    if not Path(path).exists() and any(path in (key.path for key in keys) for _, keys in reference.sections()):
        raise ConfigError(f"{path} is a key, not a file: agentrl config --describe {path}")
    return yaml.safe_dump(configs.load(path, overrides).model_dump(mode="json"), sort_keys=False, width=120)


def documentation(key: str, markdown: bool, schema: bool) -> str:
    """The documentation of a key (default: the list of all), the page, or the schema. Raises ConfigError."""
    from agentrl.config import reference
    from agentrl.config import schema as schemas

    known = registered_names()
    if markdown:
        return reference.markdown(known)
    return schemas.text(known) if schema else "\n".join(_lines(*reference.find(key, known))) + "\n"


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
        yield from (
            ("", "keys:")
            if key.path
            else ("Sections and keys of a config; `agentrl config --describe KEY` says more.",)
        )
    for inner in keys:
        yield ""
        yield from textwrap.indent("\n".join(_entry(inner, with_choices=not key.path)), "  ").splitlines()


def _entry(key: Key, *, with_choices: bool = True) -> Iterator[str]:
    """Path, type and default on a line, then the documentation, then the choices."""
    default = f"default {key.default}" if key.default is not None else "" if key.section else "required"
    head = f"{key.path}: " + ", ".join(filter(None, (key.kind, default)))
    yield from textwrap.wrap(head, WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    yield from textwrap.indent(textwrap.fill(key.doc, WIDTH - 6), "    ").splitlines()
    width = max(map(len, key.choices), default=0)
    for name, line in key.choices.items() if with_choices else ():
        text = textwrap.fill(line, WIDTH - width - 10)
        yield f"      {name:<{width}}  " + text.replace("\n", "\n" + " " * (width + 8))
