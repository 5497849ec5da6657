"""Doctor's checks of one config: model and template, ports and servers, sandbox, and the resources of the run.

Starts only a sandbox; cli/doctor/deep.py starts engine and learner.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.buffer.staleness import StalenessRule
from agentrl.cli.doctor.findings import Finding, crashed, fail, ok, shortened, warn
from agentrl.cli.doctor.machine import GIB
from agentrl.config import Config, EngineConfig, LearnerConfig, SandboxConfig
from agentrl.engine import hub, memory, vllm_command
from agentrl.engine.model_size import ModelSize, model_size
from agentrl.engine.placement import Placement
from agentrl.errors import ConfigError, EngineError
from agentrl.training import launch_ranks

BASE_RUN_BYTES = GIB // 2  # metrics, trajectories and logs of a small run
BASE_SHARED_BYTES = GIB // 4
BASE_MEMORY_BYTES = 3 * GIB  # vLLM, DeepSpeed and the sandbox with nothing loaded
BASE_DESCRIPTORS = 512
DESCRIPTORS_AN_EPISODE = 3  # to the engine, to the sandbox, and one of its own
COPIES_OF_WEIGHTS = 3  # the previous version, the current one, and the next while it is written
LEARNER_SHARE = 0.9
"""Of the memory of a GPU that a rank uses, beside an engine or alone."""
STRONG = ("namespaces", "docker")
SANDBOX_FIXES = 'docs/sandbox.md, "When it does not start", has the usual causes'


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run needs of the machine: estimates, lower bounds where the model's size is unknown.

    Example:
        needs(config, model_size(config.model.path)).memory_bytes
    """

    run_bytes: int = BASE_RUN_BYTES
    whole_run_bytes: int = BASE_RUN_BYTES
    """With every export and checkpoint of the config."""
    shared_bytes: int = BASE_SHARED_BYTES
    memory_bytes: int = BASE_MEMORY_BYTES
    descriptors: int = 2 * BASE_DESCRIPTORS
    gpus: int | None = None
    """None: the run needs none."""


def needs(config: Config, size: ModelSize | None, *, placement: Placement | None = None) -> Needs:
    """Computed from the config: weights in its dtype, Adam's two float32 states, and float32 weights if dtype differs.

    On a CPU the learner also holds two float32 sums of gradients (docs/learner.md). On GPUs host memory holds each
    rank's weights while they are loaded and, if offloaded, its part of the optimizer: states, gradient, two temporary
    tensors of AdamW, and a copy of the weights to send. `placement` None: that of this machine.
    """
    placement = placement or _placement(config)
    learner, rollout = config.learner, config.rollout
    num_parameters = size.num_parameters if size else 0
    is_wide = config.model.dtype == "float32"
    weights_bytes = num_parameters * (4 if is_wide else 2)
    adam_bytes = num_parameters * (8 if is_wide else 12)
    num_exports = 1 + (config.train.steps // learner.save_every if learner.save_every else 0)
    num_states = learner.keep_checkpoints + 1 if learner.checkpoint_every else 0
    is_on_cpu = (placement.device if placement else _device(config.engine)) == "cpu"
    num_engines = config.eval.engines + config.engine.num_started if is_on_cpu else 0
    engine_bytes = (weights_bytes + memory.cpu_kv_cache_bytes(config.engine)) * num_engines
    learner_bytes = weights_bytes + adam_bytes + 8 * num_parameters if is_on_cpu else 0
    ranks_here = len(placement.ranks) if placement else 0
    load_bytes = 0 if is_on_cpu else ranks_here * weights_bytes
    state_bytes = adam_bytes + 12 * num_parameters + weights_bytes if learner.offload_optimizer else 0
    offload_bytes = 0 if is_on_cpu else state_bytes * ranks_here // learner.num_ranks
    by_folder = placement is None or placement.transfer in ("safetensors", "reload")
    num_episodes = StalenessRule.of(rollout).num_slots() * rollout.num_plays
    return Needs(
        run_bytes=BASE_RUN_BYTES + weights_bytes + (weights_bytes + adam_bytes if num_states else 0),
        whole_run_bytes=BASE_RUN_BYTES + num_exports * weights_bytes + num_states * (weights_bytes + adam_bytes),
        shared_bytes=BASE_SHARED_BYTES + (COPIES_OF_WEIGHTS * weights_bytes if by_folder else 0),
        memory_bytes=BASE_MEMORY_BYTES + engine_bytes + learner_bytes + max(load_bytes, offload_bytes),
        descriptors=BASE_DESCRIPTORS + DESCRIPTORS_AN_EPISODE * num_episodes,
        gpus=(len(placement.used) or None) if placement else None,
    )


def _device(settings: EngineConfig) -> str:
    try:
        return vllm_command.device_of(settings)
    except ConfigError:  # the check of the engine reports it
        return settings.device


def _placement(config: Config) -> Placement | None:
    try:
        return vllm_command.placement_of(config)
    except ConfigError:  # the check of the engine reports it
        return None


def gpu_shares(config: Config) -> dict[int, float]:
    """The share of each GPU's memory that a run may take, by nvidia-smi's numbers; empty where those are not known."""
    placement = _placement(config)
    if placement is None:
        return {}
    engine = memory.engine_fraction(config.engine, is_shared=placement.is_shared)
    shares = {
        placement.visible.gpus[gpu].entry: LEARNER_SHARE if gpu in placement.ranks else engine for gpu in placement.used
    }
    return {int(entry): share for entry, share in shares.items()} if all(map(str.isdigit, shares)) else {}


def engine_settings(config: Config) -> Finding:
    """How the engine would be started, and who would use which GPU. FAIL for what is not available or cannot work."""
    settings = config.engine
    try:
        placement = vllm_command.placement_of(config)
        if settings.urls:
            return ok("engine", f"servers that are already running: {', '.join(settings.urls)}; {placement}")
        return ok("engine", vllm_command.describe(settings, placement).replace("\n", "; "))
    except ConfigError as error:
        return crashed("engine", error)


def learner_settings(settings: LearnerConfig) -> Finding:
    """Whether the ranks can be started: the hostfile and its requirements."""
    try:
        hosts = launch_ranks.check_hosts(settings)
    except ConfigError as error:
        return crashed("learner", error)
    where = f" on {', '.join(host.name for host in hosts)}" if hosts else ""
    return ok("learner", f"DeepSpeed on {settings.num_ranks} rank(s){where}, ZeRO stage {settings.zero_stage}")


async def engine_urls(settings: EngineConfig, *, token: str | None = None) -> list[Finding]:
    """Whether each server of `engine.url` answers and is in RL mode. Read-only."""
    from agentrl.engine.vllm_client import VLLMHttpClient
    from agentrl.engine.vllm_control import VLLMControl

    findings = []
    for url in settings.urls:
        name, server = f"engine at {url}", VLLMHttpClient(url, timeout_s=5.0, token=token)
        try:
            control = VLLMControl(server)
            await control.health()
            model, label, paused = await control.only_model(), await control.label(), await control.is_paused()
        except EngineError as error:
            fix = "start it with `agentrl engine CONFIG`, or with the flags of docs/engine.md"
            findings.append(fail(name, shortened(str(error)), fix))
        else:
            if paused:
                findings.append(fail(name, "it is paused: a weight update was interrupted", "restart it"))
            else:
                findings.append(ok(name, f"serves {model}, weights {label}"))
        finally:
            await server.close()
    return findings


def ports(engine: EngineConfig, sandbox: SandboxConfig, *, num_spare: int = 0) -> list[Finding]:
    """Whether the fixed ports of parts that are started here are free. `num_spare`: the engines of `eval.engines`."""
    from agentrl.supervision.serving import configured_port

    num_engines = num_spare + engine.num_started
    wanted = range(engine.port, engine.port + num_engines) if engine.port else []
    asked = [("engine.port", engine.host, port) for port in wanted]
    if sandbox.url is None and sandbox.port:
        asked.append(("sandbox.port", sandbox.host, sandbox.port))
    findings = []
    for key, host, port in asked:
        try:
            configured_port(host, port, key=key)
        except ConfigError:
            fix = f"choose another {key}, or 0 for any free one; `ss -ltnp 'sport = :{port}'` names the program"
            findings.append(fail(key, f"{host}:{port} is taken, or is not an address of this machine", fix))
        else:
            findings.append(ok(key, f"{host}:{port} is free"))
    return findings


def model(config: Config) -> Finding:
    """Whether the model exists, or can be made."""
    from agentrl.training.model_folder import check_model, check_reference, check_trainable, is_model_folder

    path = config.model.path
    check_trainable(config)
    check_model(config)
    check_reference(config)
    if config.model.warmstart is not None and not is_model_folder(Path(path)):
        return ok("model", f"{path} does not exist yet: the warm start makes it in the first run")
    size = model_size(path)
    if size is None and Path(path).is_dir():
        return ok("model", f"{path}: not in safetensors, so its size is not counted")
    if size is None:
        return ok("model", f"{path} of the hub, not downloaded yet: its size is not counted")
    return ok("model", f"{path}: {size.num_parameters:,} parameters, {size.num_bytes / 1e6:,.1f} MB")


def template(config: Config) -> Finding:
    """The test of turns and tool calls that a run makes at its start."""
    from agentrl.engine.model_files import CONFIG
    from agentrl.tokens.tokenizer import load_tokenizer
    from agentrl.training.model_folder import is_model_folder

    settings = config.model
    if settings.warmstart is not None and not is_model_folder(Path(settings.path)):
        return ok("chat template", "made with the model by the warm start")
    if not Path(settings.path).is_dir() and hub.file_of(settings.path, CONFIG) is None:
        found = "not tried: the model is not here, and the hub does not answer or has no such model"
        return fail("chat template", found, "see the line of the model")
    try:
        turns = load_tokenizer(settings).with_tool_format(config.rollout.tool_format)
    except ConfigError as error:
        fix = "set model.renderer or model.chat_template_args, or take another model: docs/tokens.md"
        return fail("chat template", shortened(str(error)), fix)
    return ok("chat template", f"passes: turns by the {turns.strategy.name}, calls as {turns.format.name}")


async def sandbox(settings: SandboxConfig, *, token: str | None = None) -> Finding:
    """Start a sandbox as a run would, or ask the one of `sandbox.url`, and report its isolation."""
    from sandbox.client import SandboxClient, SandboxUnavailable

    try:
        if settings.url is not None:
            async with SandboxClient(settings.url, token) as client:
                health = await client.health()
        else:
            options: dict[str, int | str | bool] = {"memory_bytes": settings.memory_bytes}
            options["allow_unsafe"] = settings.allow_unsafe
            async with SandboxClient.embedded(settings.backend, 1, **options) as client:
                health = await client.health()
    except SandboxUnavailable as error:
        return fail("sandbox", shortened(str(error)), SANDBOX_FIXES)
    return isolation_of(health.backend, health.isolation, health.degraded)


def isolation_of(backend: str, isolation: str, degraded: list[str]) -> Finding:
    """How strong the isolation of a working sandbox is."""
    if backend == "unsafe":
        return warn("sandbox", "unsafe: programs reach your files and the network", "set sandbox.backend=auto")
    if backend not in STRONG:
        found = f"{backend}, weaker than namespaces: {shortened('; '.join(degraded), 200)}"
        return warn("sandbox", found, "allow user namespaces, or let it run as root: docs/sandbox.md")
    if degraded:
        return warn("sandbox", f"{backend}, degraded: {shortened('; '.join(degraded), 200)}", SANDBOX_FIXES)
    return ok("sandbox", f"{backend}: {isolation}")


def environment(config: Config) -> Finding:
    """Whether the environment's class can be loaded."""
    from agentrl.env import load_env_class

    try:
        found = load_env_class(config.env.target, config.env.kwargs)
    except ConfigError as error:
        return crashed("environment", error)
    return ok("environment", f"{config.env.target} is {found.__module__}.{found.__qualname__}")
