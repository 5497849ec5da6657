"""The layout that CONTRIBUTING.md promises: documented packages, files and functions of a readable size."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import TypeGuard

import pytest

from tests.test_imports import GRAPH, MODULES, ROOT

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_ARGUMENTS = 8
MIN_FILE_LINES = 60
SMALL_FILES = {
    "agentrl/__main__.py": "`python -m agentrl`",
    "agentrl/api/checking.py": "one function of the API, one file",
    "agentrl/buffer/journal_format.py": "changes with the file format, not with the states of a group",
    "agentrl/buffer/recent_signal.py": "when a run has nothing to learn, independent of slots and the journal",
    "agentrl/check/group_score.py": "one check, one file: check_env.py is at the limit",
    "agentrl/cli/rollout.py": "what one command prints",
    "agentrl/config/hostfile.py": "placement and launcher read it",
    "agentrl/config/section.py": "the base of all sections: each imports it",
    "agentrl/engine/hub.py": "the one place that asks the hub: a model's size, its config, a plan",
    "agentrl/engine/shared.py": "workers are told of engines so: independent of pools and of clients",
    "agentrl/engine/vllm/auth_middleware.py": "loaded by name inside vLLM's server",
    "agentrl/engine/vllm/plugin.py": "the entry point that vLLM loads",
    "agentrl/engine/vllm/serve.py": "the main module of vLLM's processes",
    "agentrl/engine/vllm/worker.py": "loaded by name inside vLLM's worker",
    "agentrl/report/sinks/tensorboard.py": "one sink, one file",
    "agentrl/report/sinks/trackio.py": "one sink, one file",
    "agentrl/report/sinks/wandb.py": "one sink, one file",
    "agentrl/rollouts/monitored_env.py": "a wrapper that a run adds, independent of rollouts",
    "agentrl/supervision/backoff.py": "one rule, used by children, clients and retries",
    "agentrl/supervision/parent.py": "runs inside vLLM's processes and the learner's ranks",
    "agentrl/tokens/vocabulary.py": "independent of turns and dialogues",
    "envs/adapters/questions.py": "shared by two adapters",
    "envs/adapters/seed_tasks.py": "shared by two adapters",
    "envs/aime.py": "one environment, one file",
    "envs/countdown_search.py": "its source is sent to the sandbox",
    "envs/equality_worker.py": "runs in a process of its own",
    "envs/gsm8k.py": "one environment, one file",
    "envs/math_python.py": "one environment, one file",
    "envs/splits.py": "shared by the generated environments",
    "sandbox/backends/folders.py": "shared by the backends with folders",
    "sandbox/backends/janitor.py": "runs in a process of its own",
    "sandbox/backends/unsafe.py": "one backend, one file",
    "sandbox/open_files.py": "what fits into a limit, independent of the command line",
    "trainer/gradient/handoff.py": "the only code that feeds DeepSpeed's backward",
    "trainer/gradient/tiles.py": "one idea, which recorded passes and the model both need",
    "trainer/gradient/divided_recorder.py": "the only part of recording that ranks exchange tokens for",
    "trainer/objective/registry.py": "the one place that knows every objective",
    "trainer/gpu_report/__main__.py": "the command of one cell",
    "trainer/objective/imitation.py": "objectives without advantages",
    "trainer/plan/choice.py": "the one decision that a run takes from the plan",
    "trainer/process_end.py": "a rank, a test's rank and the entry point end with it; it loads nothing",
    "trainer/schedules.py": "pure functions of the step's number, independent of DeepSpeed",
}
PACKAGE_NAMES = [name for name, path in MODULES.items() if path.name == "__init__.py"]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("package", PACKAGE_NAMES)
def test_a_package_says_what_it_is_for_what_it_may_import_and_where_to_start(package: str) -> None:
    said = ast.get_docstring(parse(MODULES[package])) or ""
    text = " ".join(said.split())
    purpose, *_ = said.split("\n\n")
    assert purpose and "May import: " in text and "Start reading in " in text


def package_imports(package: str) -> set[str]:
    """Modules that a package, with its inner ones, imports from outside itself."""
    inside = {name for name in MODULES if name == package or name.startswith(f"{package}.")}
    return set().union(*(GRAPH[name] for name in inside)) - inside


def may_import(package: str) -> str:
    """The sentence of the docstring, up to a semicolon, after which come remarks."""
    text = " ".join((ast.get_docstring(parse(MODULES[package])) or "").split())
    sentence = re.split(r"\.(?: |$)", text.partition("May import: ")[2], maxsplit=1)[0]
    return sentence.partition(";")[0]


@pytest.mark.parametrize("package", PACKAGE_NAMES)
def test_a_package_imports_exactly_what_it_says(package: str) -> None:
    said = may_import(package)
    if re.fullmatch(r"everything before (it|`agentrl\.cli`) in the order of imports", said):
        return  # which tests/test_imports.py holds
    named = set(re.findall(r"`([\w.]+)`", said))
    covered = {name: {got for got in package_imports(package) if f"{got}.".startswith(f"{name}.")} for name in named}
    assert package_imports(package) == set().union(*covered.values()), "more is imported"
    assert all(covered.values()), "not all of them are imported"


def test_the_modules_of_the_trainer_import_in_the_order_of_its_docstring() -> None:
    text = " ".join((ast.get_docstring(parse(MODULES["trainer"])) or "").split())
    (chain,) = re.findall(r"imports earlier ones only: (.*?)\.", text)
    order = re.split(r", | -> ", chain)
    parts = {name.split(".")[1] for name in MODULES if name.startswith("trainer.")}
    apart = ("gpu_report",)
    assert sorted([*order, *apart]) == sorted(parts)
    wrong = [
        f"{module} imports {imported}"
        for module, part in ((name, name.split(".")[1]) for name in MODULES if name.startswith("trainer."))
        for imported in GRAPH[module]
        if part not in apart and imported.startswith("trainer.")
        if part != (other := imported.split(".")[1]) and other not in order[: order.index(part)]
    ]
    assert wrong == []


def test_no_file_and_no_function_is_too_long() -> None:
    long = [str(path.relative_to(ROOT)) for path in MODULES.values() if num_lines(path) > MAX_FILE_LINES]
    long += [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in MODULES.values()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_constructor_takes_too_many_arguments() -> None:
    wide = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES.values()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        if len(node.args.args) + len(node.args.kwonlyargs) - 1 > MAX_CONSTRUCTOR_ARGUMENTS
    ]
    assert wide == []


def test_a_small_file_has_a_reason() -> None:
    small = {
        str(path.relative_to(ROOT))
        for path in MODULES.values()
        if path.name != "__init__.py" and num_lines(path) < MIN_FILE_LINES
    }
    assert small <= SMALL_FILES.keys(), "give the new ones a reason, or merge them into a larger neighbour"
    assert all((ROOT / name).is_file() for name in SMALL_FILES)


# Packages and modules whose public classes show how they are used. agentrl/engine/vllm is part of agentrl.engine.
WITH_EXAMPLES = (
    *(f"agentrl.{name}" for name in ("env", "tools", "wrappers", "testing", "types", "check", "rollouts", "engine")),
    *("agentrl.buffer", "agentrl.tokens", "agentrl.cli.templates"),
    *(
        "sandbox.client",
        "sandbox.protocol",
        "sandbox.pool",
        "sandbox.server",
        "sandbox.gateway",
        "sandbox.backends.base",
    ),
    *("trainer.learner", "trainer.checkpoint", "trainer.objective", "trainer.gradient", "trainer.split_variance"),
    "trainer.step_stats",
)
# Classes that are raised, compared or decoded, never called by a reader.
NEEDS_NO_EXAMPLE = ("Exception", "Enum", "msgspec.Struct")


def is_code(text: str) -> bool:
    """Whether a paragraph or an inline code is Python that uses something, and not a name or prose."""
    try:
        tree = ast.parse(inspect.cleandoc(text))
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call | ast.Attribute | ast.ClassDef | ast.Raise) for node in ast.walk(tree))


def has_example(docstring: str) -> bool:
    if re.search(r"Example[:,]|>>> |^ {4,}(class|async|await|with|@|\w+ = )\b", docstring, re.MULTILINE):
        return True
    inline = (code for code in re.findall(r"`([^`]+)`", docstring) if "(" in code)
    return any(map(is_code, [*docstring.split("\n\n"), *inline]))


def needs_example(node: ast.stmt) -> TypeGuard[ast.ClassDef]:
    if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
        return False
    return not any(is_a(name, kind) for name in map(ast.unparse, node.bases) for kind in NEEDS_NO_EXAMPLE)


def is_a(base: str, kind: str) -> bool:
    """By name: ToolError and SandboxGone are exceptions, StrEnum is an Enum."""
    errors = ("Exception", "Error", "Unavailable")
    return base.endswith(errors if kind == "Exception" else kind)


@pytest.mark.parametrize("part", WITH_EXAMPLES)
def test_public_classes_have_an_example(part: str) -> None:
    lacking = [
        f"{name}.{node.name}"
        for name, path in MODULES.items()
        if f"{name}.".startswith(f"{part}.")
        for node in parse(path).body
        if needs_example(node) and not has_example(ast.get_docstring(node) or "")
    ]
    assert lacking == []


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("module", [name for name, path in MODULES.items() if ">>> " in path.read_text()])
def test_the_examples_of_docstrings_are_true(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert found.failed == 0
