"""Makes a plan: who sits on which GPU, what each phase takes of it, what the machine must have, and the verdict.

Pure: the learner's needs come from `ask.py`. Sizes are computed from shapes and settings, not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.cli.doctor.config_checks import Needs, needs
from agentrl.cli.doctor.plan.cards import Card, pretended
from agentrl.cli.doctor.plan.engine_memory import EngineNeeds, engine_needs, running
from agentrl.cli.doctor.plan.records import GradientNeeds, LearnerNeeds
from agentrl.cli.doctor.plan.step_time import StepTime, step_time
from agentrl.config import Config
from agentrl.engine import memory
from agentrl.engine.model_size import ModelSize
from agentrl.engine.placement import Placement, place
from agentrl.engine.vllm_command import ranks_here

SIZES_OF_SEQUENCES = (512, 256, 192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPhase:
    """One phase on one GPU, in bytes. Example: `phase.num_bytes` is what must fit."""

    name: str
    learner: int
    engine: int
    parts: Mapping[str, int]
    """The learner's tensors."""

    @property
    def num_bytes(self) -> int:
        """Learner and engine together."""
        return self.learner + self.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """One GPU. Example: `max(gpu.phases, key=lambda phase: phase.num_bytes).name`."""

    index: int
    card: Card
    roles: tuple[str, ...]
    phases: tuple[GpuPhase, ...]

    @property
    def peak(self) -> GpuPhase:
        """The largest phase."""
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def fits(self) -> bool:
        """Whether every phase fits."""
        return self.peak.num_bytes <= self.card.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run would take, and whether it fits. Example: `plan.problems` is empty where it does."""

    placement: Placement
    gpus: tuple[GpuPlan, ...]
    learner: LearnerNeeds
    gradient: GradientNeeds
    """The first method of `learner` that fits; the last, which takes least, where none does."""
    engine: EngineNeeds
    machine: Needs
    time: StepTime
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether it would run."""
        return not self.problems


def make_plan(config: Config, learner: LearnerNeeds, cards: Sequence[Card], *, mean_tokens: int | None = None) -> Plan:
    """The plan of one machine. With `learner.hostfile` every machine of the learner has these cards; with `engine.url`
    the engines have machines of their own, of such cards too.

    Raises ConfigError for too few GPUs, and for settings that placement refuses.
    """
    mean = mean_tokens or max(1, config.rollout.max_context // 4)
    placement = place(
        config.engine,
        config.learner,
        visible=pretended(cards),
        device="cuda",
        num_ranks=ranks_here(config.learner),
        num_spare=config.eval.engines,
    )
    smallest = min((cards[gpu] for gpu in placement.used), key=lambda card: card.total_bytes, default=cards[0])
    engine = engine_needs(config, learner.shape, smallest, is_shared=placement.is_shared, mean_tokens=mean)
    gradient, gpus = _first_that_fits(cards, placement, learner, engine)
    itemsize = 4 if config.model.dtype == "float32" else 2
    num_parameters = learner.shape.num_parameters
    size = ModelSize(num_parameters=num_parameters, num_bytes=num_parameters * itemsize)
    return Plan(
        placement=placement,
        gpus=gpus,
        learner=learner,
        gradient=gradient,
        engine=engine,
        machine=needs(config, size, placement=placement),
        time=step_time(config, learner.shape, gradient.passes, engine, smallest, mean_tokens=mean),
        problems=(*_too_full(gpus), *_no_room_for_kv(config, engine)),
        warnings=tuple(_preempted(config, engine, mean)),
    )


def _first_that_fits(
    cards: Sequence[Card], placement: Placement, learner: LearnerNeeds, engine: EngineNeeds
) -> tuple[GradientNeeds, tuple[GpuPlan, ...]]:
    for gradient in learner.methods:
        gpus = tuple(
            _gpu(cards[index], index=index, placement=placement, gradient=gradient, kept=learner.kept, engine=engine)
            for index in placement.used
        )
        if all(gpu.fits for gpu in gpus):
            break
    return gradient, gpus


def _gpu(
    card: Card,
    *,
    index: int,
    placement: Placement,
    gradient: GradientNeeds,
    kept: Mapping[str, int],
    engine: EngineNeeds,
) -> GpuPlan:
    ranks = [f"rank {rank}" for rank, gpu in enumerate(placement.ranks) if gpu == index]
    engines = [at for at, gpus in enumerate(placement.engines) if index in gpus]
    roles = (*ranks, *(_engine_role(placement, at) for at in engines))
    phases = []
    for phase in gradient.phases if ranks else ():
        is_awake = phase.name in ("load", "prove", "start", "publish", "checkpoint")
        beside = engine.num_bytes if is_awake else engine.asleep_bytes
        phases.append(_phase(phase.name, phase.parts, len(ranks), beside * len(engines)))
    if engines:
        phases.append(_phase("generate", kept if ranks else {}, len(ranks), engine.num_bytes * len(engines)))
    return GpuPlan(index=index, card=card, roles=roles, phases=tuple(phases))


def _engine_role(placement: Placement, index: int) -> str:
    num_playing = len(placement.engines) - placement.num_spare
    if index >= num_playing:
        return "engine for evaluations"
    return f"engine {index}" if num_playing > 1 else "engine"


def _phase(name: str, parts: Mapping[str, int], num_ranks: int, engine: int) -> GpuPhase:
    tensors = sum(parts.values()) * num_ranks
    outside = memory.OUTSIDE_BYTES * num_ranks
    return GpuPhase(
        name=name, learner=round(tensors * (1 + memory.FRAGMENTATION)) + outside, engine=engine, parts=parts
    )


def _too_full(gpus: Sequence[GpuPlan]) -> list[str]:
    """One line for all GPUs that take too much in the same phase."""
    found: dict[str, list[int]] = {}
    for gpu in gpus:
        if not gpu.fits:
            peak, total = gpu.peak, gpu.card.total_bytes
            what = f"{peak.name} takes {peak.num_bytes / 1e9:.1f} GB of {total / 1e9:.1f}"
            found.setdefault(what, []).append(gpu.index)
    return [f"GPU {','.join(map(str, indices))}: {what}" for what, indices in found.items()]


def _no_room_for_kv(config: Config, engine: EngineNeeds) -> list[str]:
    if engine.full_contexts:
        return []
    context = config.rollout.max_context
    return [
        f"the engine has {max(0, engine.kv_bytes) / 1e9:.2f} GB for KV entries, and one context of "
        f"{context} tokens takes {engine.kv_bytes_per_token * context / 1e9:.2f}: "
        "raise engine.gpu_memory_fraction or engine.tensor_parallel, or lower rollout.max_context"
    ]


def _preempted(config: Config, engine: EngineNeeds, mean_tokens: int) -> list[str]:
    """Where more sequences run than fit, vLLM drops some and computes their prompts again."""
    wanted = running(config)
    if not engine.full_contexts or engine.mean_contexts >= wanted:
        return []
    better = next((size for size in SIZES_OF_SEQUENCES if size <= engine.mean_contexts), 1)
    return [
        f"KV: {engine.full_contexts} full contexts or {engine.mean_contexts} of {mean_tokens} tokens fit, and {wanted} "
        f"run at once: sequences would be preempted. Set engine.max_num_seqs={better}, or give the engine more memory"
    ]
