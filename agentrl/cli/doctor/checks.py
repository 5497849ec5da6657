"""Chooses the checks: of the machine alone, or of the machine for one config. Independent of their results."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from subprocess import SubprocessError
from threading import Lock
from typing import TypeVar

from agentrl.cli.doctor import config_checks, machine, packages, toolchain
from agentrl.cli.doctor.findings import Check, Finding, ok, shortened, warn
from agentrl.config import Config, SandboxConfig
from agentrl.engine import vllm_command
from agentrl.engine.gpus import has_mps
from agentrl.engine.model_size import ModelSize, model_size
from agentrl.errors import ConfigError

T = TypeVar("T")

SANDBOX_DEADLINE_S = 120.0
TORCH_DEADLINE_S = 120.0  # a first import from a cold disk
PLAN_DEADLINE_S = 600.0  # the learner's code runs without content, for each setting that is tried
MODEL_DEADLINE_S = 120.0  # it may be on the hub
NEEDED_BY = {"torch": "the learner", "transformers": "a chat template", "deepspeed": "the learner"}
SHARED = Path("/dev/shm")
FREE_SHARED = "enlarge it: `mount -o remount,size=SIZE /dev/shm`, in a container docker's `--shm-size`"
FREE_DISK = "delete old runs there, or set out_dir to another disk"
FREE_TEMP = "delete files there, or set TMPDIR to another disk"
MIN_TEMP_BYTES = machine.GIB // 4  # the sandbox's folders, sockets, logs of a start


def checks(config: Config | None, *, engine_token: str | None = None, sandbox_token: str | None = None) -> list[Check]:
    """All checks that do not need a running engine. Without a config: those of the machine alone.

    The tokens are for servers that are already running.
    """
    settings = config.sandbox if config else SandboxConfig()
    ask_sandbox = partial(config_checks.sandbox, settings, token=sandbox_token)
    return [
        *_packages(config),
        *_machine(config),
        *(_of(config, engine_token) if config else []),
        Check(name="sandbox", ask=ask_sandbox, deadline_s=SANDBOX_DEADLINE_S),
    ]


def _packages(config: Config | None) -> list[Check]:
    return [
        Check(name="Python", ask=lambda: packages.python(packages.read_pins())),
        Check(name="packages", ask=partial(_installed, config)),
    ]


def _installed(config: Config | None) -> list[Finding]:
    """One check for all packages, since all read the same folders."""
    installed = packages.installed_packages()
    pins = packages.read_pins(is_cuda=packages.is_cuda_build(installed))
    starts_engine = config is not None and not config.engine.urls
    return [
        *(
            packages.package(name, installed.get(name), pins, needed=config is not None, part=NEEDED_BY[name])
            for name in packages.SINGLE
        ),
        packages.engine(installed, pins, needed=starts_engine),
        packages.others(installed, pins),
    ]


def _machine(config: Config | None) -> list[Check]:
    needs = _once(lambda: config_checks.needs(config, _size(config)) if config else config_checks.Needs())
    return [
        Check(name="GPU", ask=lambda: _gpus(config, needs), deadline_s=TORCH_DEADLINE_S),
        Check(name="memory", ask=lambda: machine.memory(needed_bytes=needs().memory_bytes)),
        Check(name="run folder", ask=lambda: _run_folder(config, needs())),
        Check(name="/dev/shm", ask=lambda: _shared(needs())),
        Check(name="temporary files", ask=_temporary),
        Check(name="open files", ask=lambda: machine.descriptors(needed=needs().descriptors)),
        Check(name="loopback", ask=machine.loopback),
        Check(name="clock", ask=lambda: machine.clock(machine.read_clocks())),
    ]


def _of(config: Config, engine_token: str | None) -> list[Check]:
    return [
        Check(name="environment", ask=lambda: config_checks.environment(config)),
        Check(name="model", ask=lambda: config_checks.model(config), deadline_s=MODEL_DEADLINE_S),
        Check(name="chat template", ask=lambda: config_checks.template(config), deadline_s=MODEL_DEADLINE_S),
        Check(name="engine", ask=lambda: config_checks.engine_settings(config)),
        Check(name="learner", ask=lambda: config_checks.learner_settings(config.learner)),
        Check(name="memory plan", ask=lambda: _memory_plan(config), deadline_s=PLAN_DEADLINE_S),
        Check(name="engine.url", ask=partial(config_checks.engine_urls, config.engine, token=engine_token)),
        Check(
            name="ports", ask=lambda: config_checks.ports(config.engine, config.sandbox, num_spare=config.eval.engines)
        ),
    ]


def _memory_plan(config: Config) -> list[Finding]:
    """On GPUs only: for a CPU the check of the memory says it."""
    try:
        if vllm_command.placement_of(config).device == "cpu":
            return []
    except ConfigError:  # the check of the engine reports it
        return []
    from agentrl.cli.doctor.plan.command import plan_finding

    try:
        return [plan_finding(config)]
    except ConfigError as error:  # a size that is not known here does not prevent the run
        fix = "`agentrl doctor CONFIG --plan` computes it with --gpus or --model-config"
        return [warn("memory plan", shortened(f"not computed: {error}"), fix)]


def _once(work: Callable[[], T]) -> Callable[[], T]:
    """`work`, done once, by the first thread that calls; others wait for its result."""
    lock, kept = Lock(), cache(work)

    def ask() -> T:
        with lock:
            return kept()

    return ask


def _size(config: Config) -> ModelSize | None:
    try:
        return model_size(config.model.path)
    except Exception:  # the check of the model reports it
        return None


def _gpus(config: Config | None, needs: Callable[[], config_checks.Needs]) -> list[Finding]:
    installed, has_device = packages.installed_packages(), vllm_command.has_nvidia_device()
    is_cuda = packages.is_cuda_build(installed)
    try:
        found = machine.read_gpus()
    except (OSError, SubprocessError) as error:
        return [machine.no_answer(error, is_cuda_build=is_cuda)]
    torch = machine.ask_torch() if (found or has_device) and "torch" in installed else None
    findings = [machine.gpus(found, torch, has_device=has_device, wanted=needs().gpus, is_cuda_build=is_cuda)]
    if torch and torch.num_gpus and config and (shares := config_checks.gpu_shares(config)):
        findings.append(machine.gpu_memory(found, shares))
    if is_cuda:
        findings += toolchain.driver(found)
        findings.append(toolchain.compiler(toolchain.read_toolchain(os.environ), found, has_gpu=has_device))
        findings += toolchain.sharing(found, mps=has_mps(os.environ), wsl=vllm_command.on_wsl())
    return findings


def _run_folder(config: Config | None, needs: config_checks.Needs) -> Finding:
    folder = Path(config.out_dir if config else ".")
    return machine.disk(
        "run folder", folder, needed_bytes=needs.run_bytes, enough_bytes=needs.whole_run_bytes, fix=FREE_DISK
    )


def _shared(needs: config_checks.Needs) -> Finding:
    if not SHARED.is_dir():
        return ok("/dev/shm", "does not exist: weights travel through the run folder")
    return machine.disk("/dev/shm", SHARED, needed_bytes=needs.shared_bytes, fix=FREE_SHARED)


def _temporary() -> Finding:
    import tempfile

    folder = Path(tempfile.gettempdir())
    return machine.disk("temporary files", folder, needed_bytes=MIN_TEMP_BYTES, fix=FREE_TEMP)
