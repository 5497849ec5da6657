"""The learner's memory phase by phase, as formulas over its settings and counts of parameters.

They follow the code of trainer/ and of DeepSpeed 0.19; tests/trainer/plan/ holds each phase to the bytes of a real
step. With A all parameters, T the trained ones, L those of the largest weight, N ranks, w bytes of a weight, D = N
where the optimizer is divided (all stages but 0 in float32) and 1 otherwise; everything in bytes on one rank:

| what | bytes |
|---|---|
| weights | w A; stage 3: w A / N |
| proof at the start | 4 bytes for each of 2^29 weights that are proven at a time, or of L |
| optimizer | 8 T / D of AdamW, and 4 T / D of float32 weights where w = 2 or the stage is not 0; offloaded: none |
| kept gradients | room that DeepSpeed has from start to end; w = 2, stages 0 and 1: 4 T; stage 3: 4 T / N |
| sums | one_pass: 4 T, with exact norms 8 T; one_pass_sharded: 8 T / N and 4 L; plain, two_pass: none |
| gathered weights | stage 3, in a pass: w min(A, 1e9) that stay, and w min(A, 5e7) of the next ones |
| gradients, w = 2 | as a backward leaves them; stages 0 and 1: 2 T; stage 2: 6 T / N; stage 3: 10 L |
| gradients, w = 4 | stage 0: 8 T, half of it while ranks add; stage 1: 4 T + 4 T / N; stage 2: 8 T / N; stage 3: 12 L |
| step | gradient, square root: 4 T / D each, at most of 1e9 parameters in stage 3; w = 2, stages 0, 1: 2 T, 4 T / D |
| publish | stage 3: w of the largest layer; with adapters, (8 + w) L; 34 MB of the checksum |
| checkpoint | nothing more: DeepSpeed writes what it holds |

Independent of GPUs, engines and of who asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.cli.doctor.plan.records import PassCost, Phase
from agentrl.config import LearnerConfig
from agentrl.engine.checksum import CHUNK_WORDS, ROWS_ON_GPU, WORD_BYTES
from trainer.startup_proof import PART_ELEMENTS

LIVE_ELEMENTS = 10**9
"""DeepSpeed's stage3_max_live_parameters and sub_group_size."""
PREFETCH_ELEMENTS = 5 * 10**7
"""DeepSpeed's stage3_prefetch_bucket_size."""
FLAT_BYTES = 2 * 10**9
"""DeepSpeed's largest flat copy of gradients in stage 0: 5e8 elements of float32."""

CHECKSUM_BYTES = ROWS_ON_GPU * CHUNK_WORDS * WORD_BYTES
"""Scratch of agentrl/engine/checksum.py on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the formulas need. Example: `sizes_of(model, config).trained`."""

    all: int
    trained: int
    largest: int  # parameters of the largest weight
    layer: int  # parameters of the largest layer, or of embedding or head
    itemsize: int
    learner: LearnerConfig
    reference: int = 0  # bytes of the frozen second model

    @property
    def ranks(self) -> int:
        """N."""
        return self.learner.num_ranks

    @property
    def is_half(self) -> bool:
        """Whether weights take two bytes."""
        return self.itemsize == 2

    @property
    def is_split(self) -> bool:
        """Whether weights are divided among ranks."""
        return self.learner.zero_stage == 3

    @property
    def divisor(self) -> int:
        """D, of the optimizer's states."""
        return self.ranks if self.learner.zero_stage or self.is_half else 1

    @property
    def weights(self) -> int:
        """Bytes of the weights on one rank."""
        return self.itemsize * self.all // (self.ranks if self.is_split else 1)

    @property
    def optimizer(self) -> int:
        """Bytes of AdamW's states and of the float32 weights, wherever they are."""
        has_master = self.is_half or self.learner.zero_stage > 0
        return (12 if has_master else 8) * self.trained // self.divisor

    @property
    def gradient_room(self) -> int:
        """Bytes of the gradients for which DeepSpeed has room from start to end."""
        if self.is_split:
            return 4 * self.trained // self.ranks
        return 4 * self.trained if self.is_half and self.learner.zero_stage < 2 else 0

    @property
    def gathered(self) -> int:
        """Bytes of weights that a pass gathers."""
        if not self.is_split or self.ranks == 1:
            return 0
        live, ahead = min(self.all, LIVE_ELEMENTS), min(self.all, PREFETCH_ELEMENTS)
        return self.itemsize * (live + ahead)

    @property
    def one_weight(self) -> int:
        """Bytes of the largest weight's gradient, in its own type and twice in float32."""
        return (8 + self.itemsize) * self.largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What the passes of one method cost. Example: `Passes(proof=proof, norms=(), gradient=(cost,), sums=4 * T)`."""

    proof: PassCost
    """Over the short texts of trainer/startup_proof.py."""
    norms: tuple[PassCost, ...] = ()
    """Passes before the one that makes the gradient, of the frozen second model too."""
    gradient: PassCost
    sums: int = 0
    """Bytes of the method's own sums while it estimates; 0: the gradient is made in DeepSpeed."""
    handed_sums: int = 0
    """Bytes of those that are handed to DeepSpeed."""


def phases(sizes: Sizes, passes: Passes) -> tuple[Phase, ...]:
    """Every phase of a learner on one GPU, in the order of a run; those of a step are of the second and later ones."""
    kept, whole = kept_parts(sizes), {"weights": sizes.itemsize * sizes.all}
    in_pass = {"gathered": sizes.gathered}
    made: Mapping[str, int] = {"sums": passes.sums} if passes.sums else _gradients(sizes)
    found = [
        Phase(name="load", parts=whole),
        Phase(name="prove", parts={**whole, "sums": _proof_sum(sizes), "pass": passes.proof.peak_bytes}),
        Phase(name="start", parts=_start(sizes)),
    ]
    if passes.norms:
        before = max(one.peak_bytes for one in passes.norms)
        held = {"sums": passes.sums} if passes.sums else {}
        found.append(Phase(name="norms", parts=_present({**kept, **held, **in_pass, "pass": before})))
    estimate = {**kept, **made, **in_pass, "pass": passes.gradient.peak_bytes}
    found.append(Phase(name="estimate", parts=_present(estimate)))
    if passes.sums:
        found.append(Phase(name="hand-over", parts={**kept, **_handed(sizes, passes.handed_sums)}))
    found += [
        Phase(name="step", parts={**kept, **_stepped(sizes)}),
        Phase(name="publish", parts={**kept, **_published(sizes), "checksum": CHECKSUM_BYTES}),
        Phase(name="checkpoint", parts=kept),
    ]
    return tuple(found)


def kept_parts(sizes: Sizes) -> dict[str, int]:
    """What exists between steps, and so in each phase of a step."""
    parts = {"weights": sizes.weights, "reference": sizes.reference}
    if not sizes.learner.offload_optimizer:
        parts |= {"optimizer": sizes.optimizer, "kept gradients": sizes.gradient_room}
    return _present(parts)


def _present(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}


def _proof_sum(sizes: Sizes) -> int:
    """Of the weights that are proven at a time."""
    return 4 * min(sizes.trained, max(PART_ELEMENTS, sizes.largest))


def _start(sizes: Sizes) -> dict[str, int]:
    """DeepSpeed's start: it copies the weights into its buffers, then makes the float32 ones."""
    whole = sizes.itemsize * sizes.all
    copied = sizes.itemsize * sizes.all // (sizes.ranks if sizes.is_split else 1)
    if sizes.learner.zero_stage == 0 and not sizes.is_half:
        return {"weights": whole}
    states = 0 if sizes.learner.offload_optimizer else 8 * sizes.trained // sizes.divisor
    if sizes.is_half and sizes.learner.zero_stage < 2 and not sizes.learner.offload_optimizer:
        states = 4 * sizes.trained + 4 * sizes.trained // sizes.divisor
    if states >= whole:
        one = {"one weight": sizes.itemsize * sizes.largest} if sizes.is_split else {}
        return {"weights": copied, "optimizer": states, **one}
    return {"weights": whole, "copy": copied}


def _gradients(sizes: Sizes) -> dict[str, int]:
    """What the backward leaves in DeepSpeed until the step."""
    stage, mine = sizes.learner.zero_stage, sizes.trained // sizes.ranks
    if stage == 3:
        return {"one weight": sizes.one_weight}
    if stage == 2:
        return {"gradients": (4 + sizes.itemsize) * mine}
    if sizes.is_half:
        added = 4 * sizes.trained if sizes.learner.offload_optimizer else 0
        return {"gradients": sizes.itemsize * sizes.trained + added}
    return {"gradients": 4 * sizes.trained, "added": 4 * mine if stage else min(4 * sizes.trained, FLAT_BYTES)}


def _handed(sizes: Sizes, sums: int) -> dict[str, int]:
    """A sum exists until its gradient does."""
    stage, mine = sizes.learner.zero_stage, sizes.trained // sizes.ranks
    if stage == 3:
        return {"sums": sums, "one weight": sizes.one_weight}
    if stage == 2:  # DeepSpeed may hold back a parameter's gradient until its bucket is full
        return {"sums": sums, "gradients": 4 * mine, "one weight": 4 * sizes.largest}
    made = sum(_gradients(sizes).values())
    return {"sums" if sums > made else "gradients": max(sums, made), "one weight": 4 * sizes.largest}


def _stepped(sizes: Sizes) -> dict[str, int]:
    at_once = sizes.trained // sizes.divisor
    if sizes.learner.offload_optimizer:
        return {"gradients": sizes.itemsize * at_once}
    if sizes.is_half and sizes.learner.zero_stage < 2:
        return {"gradients": sizes.itemsize * sizes.trained, "square roots": 4 * at_once}
    if sizes.is_split:
        at_once = min(at_once, LIVE_ELEMENTS)
    return {"gradients": 4 * at_once, "square roots": 4 * at_once}


def _published(sizes: Sizes) -> dict[str, int]:
    """Tensors leave one after the other; ZeRO-3 gathers a layer at a time, an adapter is added in float32."""
    merged = sizes.one_weight if sizes.trained < sizes.all else 0
    gathered = sizes.itemsize * sizes.layer if sizes.is_split and sizes.ranks > 1 else 0
    return _present({"one layer": gathered, "one merged weight": merged})
