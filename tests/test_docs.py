"""What README.md, CONTRIBUTING.md, docs/ and the reports name exists: links, anchors, files, modules, pages.

`make docs` checks links and anchors again with the site's own rules. This test needs nothing installed for that.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import typer
import yaml

from agentrl.cli.main import app
from agentrl.config import Config

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
# Outside code: inline code may hold anything that looks like a link.
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE_BLOCK = re.compile(r"^(?P<indent> *)```.*?^(?P=indent)```$", re.DOTALL | re.MULTILINE)
TOP = r"(?:agentrl|trainer|envs|sandbox|configs|examples|benchmarks|requirements|tests|docs|docker)"
FILE = re.compile(rf"(?<![\w/.-]){TOP}/[\w./-]*\w")
SECTIONS = [name for name, field in Config.model_fields.items() if hasattr(field.annotation, "model_fields")]
DOTTED = re.compile(rf"(?<![\w/.-])(?:{'|'.join(['agentrl', 'trainer', 'envs', *SECTIONS])})(?:\.\w+)+")
ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
READERS_OWN = {"configs/mine.py"}  # a file that the reader makes
FILE_NAME = re.compile(r".*\.(log|parquet|jsonl?|py|yaml)")


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


def prose(page: Path) -> str:
    return CODE_BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = LINK.sub(lambda link: link[0].split("](")[0].lstrip("!["), heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        same = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{same}" if same else slug)
    return set(found)


def nav_pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in nav_pages(part)]


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(re.sub(r"`[^`]*`", "", prose(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_every_page_is_in_the_navigation_once() -> None:
    listed = nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    docs = [path.name for path in ROOT.glob("docs/*.md")]
    assert sorted(listed) == sorted([*docs, *map(page_id, ROOT.glob("benchmarks/*.md")), "CONTRIBUTING.md"])


@every_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = {path for code in re.findall(r"`([^`\n]+)`", prose(page)) for path in FILE.findall(code)} - READERS_OWN
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@every_page
def test_modules_names_and_config_keys_that_a_page_names_exist(page: Path) -> None:
    named = {name for code in re.findall(r"`([^`\n]+)`", prose(page)) for name in DOTTED.findall(code)}
    named = {name for name in named if not FILE_NAME.fullmatch(name) and name not in ENTRY_POINTS}
    assert [name for name in sorted(named) if not is_config_key(name) and not is_importable(name)] == []


@every_page
def test_commands_and_their_options_that_a_page_shows_exist(page: Path) -> None:
    text = page.read_text()
    lines = [line for block in CODE_BLOCK.finditer(text) for line in block[0].splitlines()]
    lines += re.findall(r"`([^`\n]+)`", text) + [line for line in text.splitlines() if line.startswith("    ")]
    shown = [match[1] for line in lines if (match := re.match(r"\s*(?:\.venv/bin/)?agentrl (\w.*)", line))]
    assert [line for line in shown if not is_command(line.split("#")[0].split())] == []


def is_command(words: list[str]) -> bool:
    """Whether `agentrl WORDS` is a command with these options. `agentrl sandbox` passes its options on."""
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.strip("[]()").partition("=")[0] for word in words if re.match(r"\[?--?[a-z]", word)}
    return not getattr(command, "commands", {}) and (
        given <= options or "ignore_unknown_options" in command.context_settings
    )


def is_config_key(dotted: str) -> bool:
    """Whether `train.steps`, `model.warmstart.steps` or `eval.sets.NAME.data` can stand in a config."""
    model: Any = Config
    is_named = False  # whether users choose the name of the next part
    for name in dotted.split("."):
        if is_named:
            is_named = False
            continue
        if (field := getattr(model, "model_fields", {}).get(name)) is None:
            return False
        candidates = [field.annotation, *get_args(field.annotation)]
        model = next((part for part in candidates if hasattr(part, "model_fields")), None)
        is_named = get_origin(field.annotation) is dict and model is not None
    return True


def is_importable(dotted: str) -> bool:
    """Whether a module, or a name inside one, can be imported: `agentrl.env.Env.step` is looked up to its end."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:length])
        if folder.with_suffix(".py").exists() or (folder / "__init__.py").exists():
            found: Any = importlib.import_module(".".join(parts[:length]))
            for name in parts[length:]:
                if not hasattr(found, name):
                    return False
                found = getattr(found, name)
            return True
    return False
