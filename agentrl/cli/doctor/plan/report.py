"""Shows a plan: a table for people, a JSON object for programs, one finding for `agentrl doctor CONFIG`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.cli.doctor.findings import Finding, fail, ok, warn
from agentrl.cli.doctor.plan.planning import GpuPlan, Plan
from agentrl.cli.doctor.plan.search import Change
from agentrl.engine.memory import FRAGMENTATION

NAME = "memory plan"
HONEST = (
    f"Computed from shapes and settings, not measured. The learner's column has its tensors, {FRAGMENTATION:.0%} for "
    "what the allocator cannot use, and 1.6 GB for CUDA and NCCL; the engine's what engine/memory.py gives it and 1.6 "
    "GB for CUDA graphs."
)
NOTHING = (
    "none of the settings tried fits, LoRA included: take more or larger GPUs, a shorter rollout.max_context or a "
    "smaller model"
)


def print_plan(plan: Plan, found: tuple[Change, Plan] | None, *, console: Console) -> None:
    """Tables, the verdict, and what to write where it does not fit."""
    cards = sorted({f"{gpu.card.name} ({gpu.card.total_bytes / 1e9:.1f} GB)" for gpu in plan.gpus})
    console.print(Text(f"{plan.placement}; on {', '.join(cards)}"))
    for gpus in _alike(plan.gpus):
        console.print(_table(gpus))
    if len(plan.learner.methods) > 1:
        console.print(_methods(plan))
    console.print(_machine(plan))
    for line in lines(plan, found):
        console.print(Text(line, style="" if line.startswith(("engine", "a step")) else "bold"))
    console.print(Text(HONEST, style="dim"))


def lines(plan: Plan, found: tuple[Change, Plan] | None) -> list[str]:
    """Contexts, time, problems, warnings, verdict and fix, a line each."""
    said = [_contexts(plan), plan.time.describe()]
    said += [f"WARN {text}" for text in plan.warnings]
    said += [f"FAIL {text}" for text in plan.problems]
    if plan.fits:
        return [*said, "It fits."]
    return [*said, "It does not fit.", _fix(found)]


def as_json(plan: Plan, found: tuple[Change, Plan] | None) -> dict[str, Any]:
    """Everything, in bytes and seconds."""
    return {
        "fits": plan.fits,
        "placement": str(plan.placement),
        "gpus": [
            {**asdict(gpu), "fits": gpu.fits, "peak_phase": gpu.peak.name, "peak_bytes": gpu.peak.num_bytes}
            for gpu in plan.gpus
        ],
        "engine": asdict(plan.engine),
        "model": asdict(plan.learner.shape),
        "gradient": plan.gradient.method,
        "gradient_peak_bytes": {one.method: one.peak_bytes for one in plan.learner.methods},
        "machine": asdict(plan.machine),
        "time": asdict(plan.time),
        "problems": list(plan.problems),
        "warnings": list(plan.warnings),
        "nearest": None if found is None else found[0].values,
    }


def finding(plan: Plan, found: tuple[Change, Plan] | None) -> Finding:
    """The verdict as one line."""
    peaks = ", ".join(
        f"GPU {gpu.index}: {gpu.peak.num_bytes / 1e9:.0f} of {gpu.card.total_bytes / 1e9:.0f} GB ({gpu.peak.name})"
        for gpu in plan.gpus
    )
    if plan.problems:
        return fail(NAME, "; ".join(plan.problems), _fix(found))
    if plan.warnings:
        return warn(NAME, f"{peaks}; {plan.warnings[0]}", "`agentrl doctor CONFIG --plan` shows every phase")
    return ok(NAME, peaks)


def _fix(found: tuple[Change, Plan] | None) -> str:
    return NOTHING if found is None else f"the nearest setting that fits: {found[0]}"


def _alike(gpus: tuple[GpuPlan, ...]) -> list[list[GpuPlan]]:
    """GPUs that take the same, in one table."""
    found: dict[object, list[GpuPlan]] = {}
    for gpu in gpus:
        key = (gpu.card, str([(phase.name, phase.learner, phase.engine) for phase in gpu.phases]))
        found.setdefault(key, []).append(gpu)
    return list(found.values())


def _table(gpus: list[GpuPlan]) -> Table:
    first = gpus[0]
    roles = "; ".join(f"GPU {gpu.index}: {', '.join(gpu.roles)}" for gpu in gpus)
    table = Table(title=roles, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("phase", "learner", "engine", "together", "free"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    table.add_column("the learner's tensors, GB", overflow="fold")
    for phase in first.phases:
        free = first.card.total_bytes - phase.num_bytes
        style = "bold red" if free < 0 else "bold" if phase is first.peak else ""
        parts = ", ".join(f"{name} {_gb(size)}" for name, size in phase.parts.items() if size >= 5 * 10**7)
        numbers = (phase.learner, phase.engine, phase.num_bytes, free)
        table.add_row(phase.name, *map(_gb, numbers), parts, style=style)
    return table


def _methods(plan: Plan) -> Text:
    """The learner's largest phase under each gradient method that the config allows."""
    peaks = ", ".join(f"{one.method} {_gb(one.peak_bytes)} GB" for one in plan.learner.methods)
    fits = "the first that fits of" if plan.fits else "and not everything fits; the learner's tensors take"
    return Text(f"learner.gradient: {plan.gradient.method} is used, {fits}: {peaks}")


def _machine(plan: Plan) -> Text:
    machine = plan.machine
    return Text(
        f"each machine: host memory {_gb(machine.memory_bytes)} GB, /dev/shm {_gb(machine.shared_bytes)} GB, run "
        f"folder {_gb(machine.run_bytes)} GB at first and {_gb(machine.whole_run_bytes)} GB in all"
    )


def _contexts(plan: Plan) -> str:
    engine = plan.engine
    return (
        f"engine: weights {_gb(engine.weights_bytes)} GB, KV cache {_gb(max(0, engine.kv_bytes))} GB on each GPU; "
        f"{engine.full_contexts} full contexts at once, {engine.mean_contexts} of {plan.time.mean_tokens} tokens"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f}"
