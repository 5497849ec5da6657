"""The order of imports: one direction for every module of the product, nothing heavy at import, the right packages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("agentrl", "envs", "sandbox", "trainer")
HEAVY = ("torch", "vllm", "deepspeed", "transformers")

# Modules and packages of agentrl: each imports only earlier ones, also inside functions.
ORDER = (
    *("types", "errors", "config", "run_folder", "supervision", "tools", "tokens", "env", "wrappers", "data"),
    *("engine", "testing", "rollouts", "chat", "workers", "report", "buffer", "view", "check", "training", "api"),
    *("cli", "__main__"),
)
# What each package may import of the other three.
ALLOWED = {
    "sandbox": set(),
    "agentrl": {"sandbox.client", "sandbox.protocol"},
    "envs": {"agentrl", "sandbox.client", "sandbox.protocol"},
    "trainer": {"agentrl", "sandbox.client", "sandbox.protocol"},
}


def _modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the product."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def imports_of(path: Path) -> set[str]:
    """Modules of the product that a file imports: at its top, in a function, or for the type checker only."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name if name in MODULES else str(node.module) for name in names)
        todo += ast.iter_child_nodes(node)
    return found & MODULES.keys()


GRAPH = {name: imports_of(path) for name, path in MODULES.items()}


def unit(module: str) -> str:
    """The part that a module belongs to: agentrl.env for agentrl.env.driver, envs for envs.aime."""
    return ".".join(module.split(".")[: 2 if module.startswith("agentrl.") else 1])


def is_allowed(importer: str, imported: str) -> bool:
    here, there = unit(importer), unit(imported)
    if here == there:
        return True
    if here.split(".")[0] != there.split(".")[0]:
        allowed = ALLOWED[here.split(".")[0]]
        return imported in allowed or there.split(".")[0] in allowed
    if here == "agentrl":  # exports what environments are written with
        return True
    return there != "agentrl" and ORDER.index(there.split(".")[1]) < ORDER.index(here.split(".")[1])


def test_every_part_of_agentrl_has_a_place_in_the_order() -> None:
    assert {name.split(".")[1] for name in MODULES if name.startswith("agentrl.")} == set(ORDER)


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_import_only_earlier_parts(package: str) -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, names in sorted(GRAPH.items())
        for imported in sorted(names)
        if module.split(".")[0] == package and not is_allowed(module, imported)
    ]
    assert wrong == []


def test_the_table_in_contributing_has_the_same_order() -> None:
    rows = re.findall(r"^\| (`agentrl/.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`agentrl/(\w+)", row)]
    assert listed == [name for name in ORDER if name != "__main__"]


def test_the_graph_of_modules_has_no_cycle() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' -> '.join(error.args[1])}")


def test_importing_agentrl_loads_nothing_heavy() -> None:
    code = (
        "import sys, agentrl, agentrl.env, agentrl.types, agentrl.config, agentrl.rollouts.episode, "
        f"agentrl.training.orchestrator, agentrl.cli.main; "
        f"loaded = set({HEAVY!r}) & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_the_sandbox_client_loads_no_server() -> None:
    code = "import sys, sandbox.client; assert not {'fastapi', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_is_ours(package: str) -> None:
    # Generic names such as `envs` exist on PyPI.
    code = f"import {package}; print({package}.__file__)"
    out = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True, cwd="/")
    assert Path(out.stdout.strip()).resolve() == (ROOT / package / "__init__.py").resolve()
