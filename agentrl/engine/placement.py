"""Who uses which GPU: the learner's ranks and the engines of one machine, and how weights travel between them.

`place` is a pure function of the settings and the visible GPUs; launch, doctor, status and the choice of the transfer
use its result. "GPU i" is the i-th visible one, counted from 0: `engine.gpus` counts in the same way.

| settings | who has which GPU |
|---|---|
| `engine.gpus` null, enough GPUs | ranks first, then engine 0, engine 1, ..., each `tensor_parallel` GPUs |
| `engine.gpus` null, one GPU, one rank, one engine of one GPU | both share it |
| `engine.gpus` null, otherwise too few | refused |
| `engine.gpus` given | engines have those, in that order; ranks the first others, or, if too few are left, the first |
| `learner.hostfile` | ranks have the first: DeepSpeed's launcher numbers them so on every machine |
| `engine.url` | ranks have the first |
| an engine alone (`agentrl engine`) | the last, or `engine.gpus` |

| where they are | `weight_transfer: auto` |
|---|---|
| `engine.weight_delta` or `eval.engines` is set | safetensors |
| no GPU in common, whole GPUs, not several engines that update one after the other | nccl |
| one engine on one GPU, which is rank 0's, on loopback, ZeRO stage below 3 | ipc |
| otherwise: other ways of sharing, MIG instances, WSL, `engine.url`, an engine alone, a CPU | safetensors |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from agentrl.config import EngineConfig, LearnerConfig
from agentrl.config.engine import Transfer
from agentrl.engine.gpus import VisibleGpu, VisibleGpus
from agentrl.errors import ConfigError

Device = Literal["cpu", "cuda"]
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who uses which GPU of this machine. Example: `place(engine, learner, visible=visible_gpus(), device="cuda")`."""

    device: Device
    transfer: Transfer
    """How weights travel: `engine.weight_transfer`, resolved."""
    ranks: tuple[int, ...] = ()
    """The GPU of each rank of this machine, as an index of the visible ones; empty on a CPU."""
    engines: tuple[tuple[int, ...], ...] = ()
    """The GPUs of each engine that is started here; empty on a CPU."""
    num_spare: int = 0
    """How many of them, the last, only evaluate."""
    visible: VisibleGpus = field(default_factory=VisibleGpus)
    sets_ranks: bool = True
    """False where DeepSpeed's launcher tells the ranks their GPUs."""

    @property
    def is_shared(self) -> bool:
        """Whether a rank and an engine use the same GPU."""
        return not set(self.ranks).isdisjoint(gpu for engine in self.engines for gpu in engine)

    @property
    def used(self) -> tuple[int, ...]:
        """The GPUs that something uses, ascending."""
        return tuple(sorted({*self.ranks, *(gpu for engine in self.engines for gpu in engine)}))

    @property
    def engine_gpu_bytes(self) -> int | None:
        """Memory of the smallest GPU that an engine uses; None on a CPU, or where it is not known."""
        sizes = [self.visible.gpus[gpu].total_bytes for engine in self.engines for gpu in engine]
        known = [size for size in sizes if size is not None]
        return min(known) if known and len(known) == len(sizes) else None

    def learner_environment(self) -> dict[str, str]:
        """What makes the ranks see their GPUs alone; empty on a CPU."""
        return self._environment(self.ranks) if self.sets_ranks else {}

    def engine_environment(self, index: int = 0) -> dict[str, str]:
        """What makes the `index`-th engine see its GPUs alone; empty on a CPU."""
        return self._environment(self.engines[index]) if self.engines else {}

    def _environment(self, gpus: Sequence[int]) -> dict[str, str]:
        return self.visible.environment([self.visible.gpus[gpu].entry for gpu in gpus]) if gpus else {}

    def names(self, gpus: Sequence[int]) -> str:
        """`GPU 0,1`, by the entries of CUDA_VISIBLE_DEVICES."""
        return "GPU " + ",".join(self.visible.gpus[gpu].entry for gpu in gpus)

    def __str__(self) -> str:
        """One sentence, e.g. `learner on GPU 0; engine on GPU 1; weights by nccl`."""
        where = [f"learner on {self.names(self.ranks)}"] if self.ranks else []
        num_playing = len(self.engines) - self.num_spare
        where += [
            f"engine{f'-{at}' if num_playing > 1 else ''} on {self.names(engine)}"
            if at < num_playing
            else f"engine for evaluations on {self.names(engine)}"
            for at, engine in enumerate(self.engines)
        ]
        idle = [gpu for gpu in range(len(self.visible.gpus)) if gpu not in self.used]
        where += [f"{self.names(idle)} idle"] if where and idle else []
        where = where or ["no GPU used here"]
        return "; ".join([*where, *(["they share a GPU"] if self.is_shared else []), f"weights by {self.transfer}"])


def place(
    engine: EngineConfig,
    learner: LearnerConfig,
    *,
    visible: VisibleGpus,
    device: Device,
    num_ranks: int | None = None,
    num_spare: int = 0,
    on_wsl: bool = False,
) -> Placement:
    """Place the ranks and the engines of one run on this machine, by the tables above.

    Args:
        device: what the engines run on; with "cpu" no GPU is given to anyone, and environments stay as they are.
        num_ranks: how many ranks this machine has, with a hostfile fewer than `learner.num_ranks`; None: all.
        num_spare: engines that only evaluate (`eval.engines`): the last ones, after those of `engine.replicas`.
        on_wsl: Windows' driver, which has no CUDA IPC.

    Raises ConfigError for too few GPUs, and for a transfer that cannot work where the parts are.

    Example:
        >>> from agentrl.engine.gpus import VisibleGpu
        >>> two = VisibleGpus(gpus=(VisibleGpu(entry="4"), VisibleGpu(entry="5")))
        >>> str(place(EngineConfig(), LearnerConfig(), visible=two, device="cuda"))
        'learner on GPU 4; engine on GPU 5; weights by nccl'
    """
    if device == "cpu":
        return Placement(device=device, transfer=_on_cpu(engine), visible=visible)
    if num_spare and engine.weight_transfer == "auto":
        engine = engine.model_copy(update={"weight_transfer": "safetensors"})
    count = learner.num_ranks if num_ranks is None else num_ranks
    fixed = learner.hostfile is not None
    ranks, engines = _seats(engine, visible, num_ranks=count, num_spare=num_spare, fixed=fixed)
    if fixed:
        _check_numbers(visible, ranks)
    _check_instances(visible, ranks, engines)
    placement = Placement(
        device=device,
        transfer="safetensors",  # replaced below: it depends on who uses which GPU
        ranks=ranks,
        engines=engines,
        num_spare=num_spare,
        visible=visible,
        sets_ranks=not fixed,
    )
    _check_exclusive(placement)
    return replace(placement, transfer=_transfer(engine, placement, is_split=learner.zero_stage == 3, on_wsl=on_wsl))


def place_engine(engine: EngineConfig, *, visible: VisibleGpus, device: Device) -> Placement:
    """Place one engine that is started by itself, for a run that names it by `engine.url`. Raises ConfigError."""
    count, width = len(visible.gpus), engine.tensor_parallel
    last = tuple(range(count - width, count)) if count >= width else None  # a learner here would have the first
    alone = engine.model_copy(update={"url": None, "replicas": 1, "gpus": engine.gpus or last})
    return place(alone, LearnerConfig(), visible=visible, device=device, num_ranks=0)


def _seats(
    engine: EngineConfig, visible: VisibleGpus, *, num_ranks: int, num_spare: int, fixed: bool
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """(GPU of each rank, GPUs of each engine)."""
    count, width = len(visible.gpus), engine.tensor_parallel
    num_engines = num_spare + engine.num_started
    first, wanted = range(num_ranks), num_engines * width
    named = _named(engine, visible, wanted) if engine.gpus is not None and num_engines else None
    if num_ranks > count or (named is None and wanted > count):
        raise _too_few(engine, visible, num_ranks, num_engines)
    if named is not None:
        others = [gpu for gpu in range(count) if gpu not in named]
        ranks = tuple(others[:num_ranks] if len(others) >= num_ranks and not fixed else first)
    elif num_ranks + wanted <= count:
        ranks, named = tuple(first), list(range(num_ranks, num_ranks + wanted))
    elif count == num_ranks == wanted == 1:
        ranks, named = (0,), [0]
    else:
        raise _too_few(engine, visible, num_ranks, num_engines)
    return ranks, tuple(tuple(named[at : at + width]) for at in range(0, wanted, width))


def _named(engine: EngineConfig, visible: VisibleGpus, wanted: int) -> list[int]:
    """The GPUs of `engine.gpus` that the engines take."""
    gpus = list(engine.gpus or ())[:wanted]
    if outside := [gpu for gpu in gpus if gpu >= len(visible.gpus)]:
        raise ConfigError(
            f"engine.gpus={list(engine.gpus or ())} counts the visible GPUs from 0, and this process sees {visible}: "
            f"there is no GPU {outside[0]}"
        )
    return gpus


def _too_few(engine: EngineConfig, visible: VisibleGpus, num_ranks: int, num_engines: int) -> ConfigError:
    count, width = len(visible.gpus), engine.tensor_parallel
    wanted, num_spare = num_engines * width, num_engines - engine.num_started
    asked = [f"learner.num_ranks={num_ranks}"] if num_ranks else []
    asked += [f"engine.replicas={engine.replicas} of engine.tensor_parallel={width}"] if num_engines > num_spare else []
    asked += [f"eval.engines={num_spare} of as many"] if num_spare else []
    if num_spare and count >= num_ranks + wanted - num_spare * width:
        fix = "set eval.engines=0, with which training waits for each evaluation"
    elif count > wanted and num_ranks > 1:
        fix = f"set learner.num_ranks={count - wanted}"
    elif count > num_ranks and wanted > 1:
        fix = f"the engines have room for {count - num_ranks} in all: lower engine.replicas or engine.tensor_parallel"
    elif count == 1:
        fix = "set learner.num_ranks=1, engine.replicas=1 and engine.tensor_parallel=1, which share it"
    elif count:
        fix = "lower learner.num_ranks, engine.replicas or engine.tensor_parallel"
    else:
        fix = "unset CUDA_VISIBLE_DEVICES, or start the container with GPUs (docker: `--gpus all`)"
    return ConfigError(
        f"the run needs {num_ranks + wanted} GPUs ({', '.join(asked)}), and this process sees {visible}: {fix}"
    )


def _check_numbers(visible: VisibleGpus, ranks: Sequence[int]) -> None:
    """DeepSpeed's launcher gives the ranks of a hostfile GPUs 0, 1, ... of the machine, whatever the mask says."""
    entries = [visible.gpus[gpu].entry for gpu in ranks]
    if entries != [str(gpu) for gpu in ranks]:
        raise ConfigError(
            f"learner.hostfile: DeepSpeed's launcher gives the ranks GPUs 0 to {len(ranks) - 1} and ignores "
            f"CUDA_VISIBLE_DEVICES={visible.mask or ','.join(entries)}: unset it, or leave learner.hostfile out where "
            "all ranks are on this machine"
        )


def _check_instances(visible: VisibleGpus, ranks: Sequence[int], engines: Sequence[Sequence[int]]) -> None:
    """A process sees one MIG instance at most, and NCCL joins none."""

    def is_mig(gpus: Sequence[int]) -> bool:
        return any(visible.gpus[gpu].is_mig for gpu in gpus)

    if len(ranks) > 1 and is_mig(ranks):
        raise ConfigError("learner.num_ranks > 1 on MIG instances: NCCL cannot join them. Set learner.num_ranks=1")
    if any(len(engine) > 1 and is_mig(engine) for engine in engines):
        raise ConfigError(
            "engine.tensor_parallel > 1 on MIG instances: a process sees only one. Set engine.tensor_parallel=1"
        )


def _check_exclusive(placement: Placement) -> None:
    """A GPU in compute mode Exclusive_Process refuses a second process."""
    if placement.is_shared and any(placement.visible.gpus[gpu].is_exclusive for gpu in placement.ranks):
        raise ConfigError(
            f"learner and engine share a GPU ({placement.names(placement.used)}) in compute mode Exclusive_Process, "
            "which one process alone may use: `sudo nvidia-smi -c DEFAULT`, or give them different ones"
        )


def _on_cpu(engine: EngineConfig) -> Transfer:
    wanted = engine.weight_transfer
    if wanted in ("nccl", "ipc") and not engine.urls:
        raise ConfigError(f"engine.weight_transfer={wanted} needs NVIDIA GPUs; use safetensors, or gloo, on a CPU")
    return "safetensors" if wanted == "auto" else wanted


def _transfer(engine: EngineConfig, placement: Placement, *, is_split: bool, on_wsl: bool) -> Transfer:
    """`engine.weight_transfer`, resolved. Raises ConfigError for one that cannot work."""
    wanted = engine.weight_transfer
    against_nccl = _against_nccl(engine, placement)
    against_ipc = _against_ipc(engine, placement, is_split=is_split, on_wsl=on_wsl)
    is_known = bool(placement.ranks and placement.engines)  # else the other side is not placed here
    if wanted == "auto" and engine.weight_delta is not None:
        return "safetensors"
    if wanted == "auto":
        is_usual = is_known and not on_wsl and not any(gpu.is_mig for gpu in _gpus(placement))
        if is_usual and against_nccl is None:
            return "nccl"
        return "ipc" if is_usual and against_ipc is None else "safetensors"
    if wanted == "gloo" and not engine.urls:
        raise ConfigError("engine.weight_transfer=gloo is for CPUs; use nccl, or ipc on one GPU")
    against = {"nccl": against_nccl, "ipc": against_ipc}.get(wanted)
    if against is not None:
        raise ConfigError(f"engine.weight_transfer={wanted} {against}")
    return wanted


def _gpus(placement: Placement) -> list[VisibleGpu]:
    return [placement.visible.gpus[gpu] for gpu in placement.used]


def _against_nccl(engine: EngineConfig, placement: Placement) -> str | None:
    """Why nccl cannot work; None where it can."""
    if engine.num_engines > 1 and engine.update_order == "rolling":
        return "reaches all engines in one broadcast: use safetensors or auto, or engine.update_order=simultaneous"
    if placement.is_shared:
        return (
            f"joins different GPUs, and learner and engine share one ({placement}): use ipc or auto, or give the "
            f"engine others, {_free(placement)}"
        )
    if placement.ranks and placement.engines and any(gpu.is_mig for gpu in _gpus(placement)):
        return "cannot join MIG instances: use safetensors or auto"
    return None


def _free(placement: Placement) -> str:
    wanted = sum(map(len, placement.engines))
    count = len(placement.visible.gpus)
    free = [gpu for gpu in range(count) if gpu not in placement.ranks][:wanted]
    if len(free) == wanted:
        return f"engine.gpus={free}"
    return f"for which {len(placement.ranks) + wanted} must be visible (now {count})"


def _sharing(placement: Placement) -> str:
    """Settings by which the engine and rank 0 share a GPU: ranks take other GPUs while there are enough."""
    num_ranks = len(placement.ranks)
    first = ",".join(gpu.entry for gpu in placement.visible.gpus[:num_ranks])
    mask = f" with CUDA_VISIBLE_DEVICES={first}" if len(placement.visible.gpus) > num_ranks else ""
    return f"engine.gpus=[0]{mask}"


def _against_ipc(engine: EngineConfig, placement: Placement, *, is_split: bool, on_wsl: bool) -> str | None:
    """Why ipc cannot work; None where it can."""
    if on_wsl:
        return "needs CUDA IPC, which Windows' driver (WSL) does not have: use safetensors or auto"
    if not engine.urls and engine.host not in LOOPBACK:
        return (
            f"makes vLLM unpickle what it receives, and others can reach engine.host={engine.host}: set "
            "engine.host=127.0.0.1, or use nccl"
        )
    if engine.num_engines > 1 or engine.tensor_parallel > 1:
        return "shares one GPU with one engine of tensor_parallel=1: use nccl on GPUs of their own, or safetensors"
    if not (placement.ranks and placement.engines):
        return None
    if placement.ranks[0] != placement.engines[0][0]:
        return f"needs engine and rank 0 on one GPU ({placement}): use nccl or auto, or {_sharing(placement)}"
    if is_split:
        return "shares the parameters' own memory, and learner.zero_stage=3 releases it layer by layer: use safetensors"
    return None
