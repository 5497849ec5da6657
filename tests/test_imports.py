"""The import rules of the four packages, frozen."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("agentrl", "envs", "sandbox", "trainer")
HEAVY = ("torch", "vllm", "deepspeed", "transformers")

# Who may import whom. The sandbox knows nobody; agentrl knows the sandbox's client, and what its command line starts.
ALLOWED = {
    "sandbox": set(),
    "agentrl": {"sandbox.client", "sandbox.protocol", "sandbox.__main__", "envs", "trainer.warmstart.train"},
    "envs": {"agentrl", "sandbox.client", "sandbox.protocol"},
    "trainer": {"agentrl", "sandbox.client"},
}

# The packages of agentrl: each imports those before it alone. The modules beside them are their common ground.
LAYERS = (
    *("http", "supervision", "reporting", "turns", "tasks", "environments", "episodes", "engines", "vllm", "chat"),
    *("checks", "run", "doctor", "commands"),
)


def imports_of(path: Path) -> set[str]:
    """Not what only the type checker reads."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
        todo += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_the_design_allows(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / package).rglob("*.py")
        for name in imports_of(path)
        if name.split(".")[0] in PACKAGES and name.split(".")[0] != package
        if name not in ALLOWED[package] and name.split(".")[0] not in ALLOWED[package]
    ]
    assert wrong == []


def test_the_packages_of_agentrl_import_in_one_direction() -> None:
    assert {path.parent.name for path in (ROOT / "agentrl").glob("*/__init__.py")} == {*LAYERS, "viewer"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for rank, layer in enumerate(LAYERS)
        for path in (ROOT / "agentrl" / layer).glob("*.py")
        for name in imports_of(path)
        for above in LAYERS[rank + 1 :]
        if name == f"agentrl.{above}" or name.startswith(f"agentrl.{above}.")
    ]
    assert wrong == []


def test_importing_agentrl_loads_nothing_heavy() -> None:
    code = (
        "import sys, agentrl, agentrl.env, agentrl.types, agentrl.config, agentrl.rollout.episode, "
        f"agentrl.train.orchestrator, agentrl.cli.main; "
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
