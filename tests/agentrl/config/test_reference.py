"""The documentation of the config is true: every key documented, every choice described, the docs current."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest

from agentrl.cli.config import registered_names
from agentrl.config import Section
from agentrl.config.presets import PRESETS
from agentrl.config.reference import NAMES, find, sections
from agentrl.config.section import Choices
from agentrl.engine.vllm_command import TRANSFER_BACKENDS
from agentrl.env import specs
from agentrl.errors import ConfigError
from agentrl.tokens.tool_formats import TOOL_FORMATS
from sandbox.backends.probe import STRONGEST_FIRST
from trainer.weights.publisher import FOLDER, STREAMED

DOCS = Path(__file__).parents[3] / "docs"
TYPES = {*NAMES.values(), "section", "mapping"}
AGENTRL = (sys.executable, "-m", "agentrl")


def choices(path: str) -> list[str]:
    return list(find(path)[0].choices)


def test_every_key_is_documented_and_every_choice_of_names_is_described() -> None:
    for section, keys in sections():
        assert section.doc
        for key in keys:
            assert key.doc, f"{key.path} has no string below it"
            names = key.kind.split(" | ")
            are_names = len(names) > 1 and all(name.isidentifier() and name not in TYPES for name in names)
            assert key.choices or not are_names, f"{key.path} does not say what its names mean"


def test_choices_that_do_not_match_their_type_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="are not the same"):

        class Wrong(Section):
            colour: Annotated[Literal["red", "blue"], Choices({"red": "warm"})] = "red"


def test_the_parts_that_carry_a_choice_out_have_the_names_of_the_config() -> None:
    assert choices("algorithm.preset") == list(PRESETS)
    assert choices("engine.weight_transfer") == ["auto", *TRANSFER_BACKENDS]
    assert sorted(choices("engine.weight_transfer")) == sorted(["auto", *FOLDER, *STREAMED])
    assert choices("rollout.tool_format") == ["auto", *TOOL_FORMATS]
    assert choices("sandbox.backend") == ["auto", *STRONGEST_FIRST]


def test_the_sandbox_says_of_its_backends_what_the_config_says() -> None:
    shown = subprocess.run([*AGENTRL, "sandbox", "--help"], capture_output=True, text=True, check=True, timeout=60)
    for name, line in find("sandbox.backend")[0].choices.items():
        assert f"{name:<12}{line}" in shown.stdout


@pytest.mark.parametrize(("option", "file"), [("--markdown", "config.md"), ("--schema", "config.schema.json")])
def test_the_generated_files_of_the_docs_are_current(option: str, file: str) -> None:
    made = subprocess.run([*AGENTRL, "config", option], capture_output=True, text=True, check=True, timeout=60)
    assert (DOCS / file).read_text() == made.stdout, f"agentrl config {option} > docs/{file}"


@pytest.mark.parametrize(
    ("page", "header", "path"),
    [
        ("algorithms.md", "| preset | ratio, treatment |", "algorithm.preset"),
        ("tokens.md", "| value | writes turns", "model.renderer"),
        ("tokens.md", "| value | the model writes |", "rollout.tool_format"),
        ("engine.md", "| `engine.weight_transfer` |", "engine.weight_transfer"),
        ("sandbox.md", "| backend | what it is |", "sandbox.backend"),
        ("environments.md", "| wrapper | |", "env.wrappers"),
        ("math.md", "| with Python | control arm |", "env.target"),
    ],
)
def test_the_tables_of_other_pages_have_every_name(page: str, header: str, path: str) -> None:
    rows = (DOCS / page).read_text().partition(header)[2].partition("\n\n")[0].splitlines()[2:]
    assert rows, f"{page} has no table that begins with {header!r}"
    written = {name for row in rows for name in re.findall(r"`([\w-]+)`", " ".join(row.split("|")[1:3]))}
    others = {spec.id for spec in specs() if not spec.entry_point.startswith("envs.")}  # of other tests
    names = {name for name in find(path, registered_names())[0].choices if not name.endswith(":")}
    assert names - others - {"auto"} <= written


def test_the_table_of_adapters_has_every_scheme() -> None:
    table = (DOCS / "adapters.md").read_text().partition("| `env.target` |")[2].partition("\n\n")[0]
    schemes = {name for name in find("env.target", registered_names())[0].choices if name.endswith(":")}
    assert schemes == set(re.findall(r"`(\w+:)[A-Z]+`", table))


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("", "algorithm: section"),
        ("engine", "engine.max_num_seqs: integer > 0, default 64"),
        ("algorithm.treatment", "clip_weight         clamped to [1 - clip_low, 1 + clip_high]"),
        ("algorithm.rho_base", "number > 0 | auto, default auto"),
        ("env.target", "ModMath-v0"),
        ("env.target", "gymnasium:"),
        ("env.wrappers", "RewardScale"),
        ("model.lora.rank", "Rank of B A."),
    ],
)
def test_describe_prints_a_key_or_a_section(key: str, shown: str) -> None:
    done = subprocess.run(
        [*AGENTRL, "config", "--describe", key], capture_output=True, text=True, check=True, timeout=60
    )
    assert shown in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


@pytest.mark.parametrize(
    ("path", "near"),
    [("max_lag", "rollout.max_lag"), ("algorithm.treatmnt", "algorithm.treatment"), ("lora", "model.lora")],
)
def test_an_unknown_key_suggests_the_nearest(path: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no key '{path}'; did you mean .*{near}"):
        find(path)
