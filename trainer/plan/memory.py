"""The learner's memory phase by phase, as formulas over its settings and counts of parameters.

They follow the code of trainer/ and of DeepSpeed 0.19; tests/trainer/plan/ holds each phase to the bytes of a real
step. With A all parameters, T the trained ones, N ranks, w bytes of a weight, D = N where the optimizer is divided
(stages 1 to 3) and 1 otherwise; everything in bytes on one rank:

| what | bytes |
|---|---|
| weights | w A; stage 3: w A / N |
| optimizer | 8 T / D of AdamW, and 4 T / D of float32 weights where w = 2 or the stage is not 0; offloaded: none |
| gradient buffer | stage 3: w T / N, from start to end |
| sums of gradients | 4 T; with exact norms 4 T more in the estimate |
| gathered weights | stage 3, in a pass: w min(A, 1e9) that stay, and w min(A, 5e7) of the next ones |
| step | float32 gradient and square root: 8 T / D, in stage 3 of at most 1e9 parameters at a time |
| publish | stage 3: w of the largest layer; with adapters, 8 + w of the largest weight; 34 MB of the checksum |
| checkpoint | nothing more: DeepSpeed writes what it holds |

Independent of GPUs, engines and of who asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.cli.doctor.plan.records import LearnerNeeds, ModelShape, PassCost, Phase
from agentrl.config import AlgorithmConfig, Config, LearnerConfig
from agentrl.engine.checksum import CHUNK_WORDS, ROWS_ON_GPU, WORD_BYTES
from trainer.gradient.attention import head_size
from trainer.objective.registry import make_objective
from trainer.plan.dry_pass import PassKind
from trainer.weights.source import layer_of

LIVE_ELEMENTS = 10**9
"""DeepSpeed's stage3_max_live_parameters and sub_group_size."""
PREFETCH_ELEMENTS = 5 * 10**7
"""DeepSpeed's stage3_prefetch_bucket_size."""

CHECKSUM_BYTES = ROWS_ON_GPU * CHUNK_WORDS * WORD_BYTES
"""Scratch of agentrl/engine/checksum.py on a GPU."""

PROOF_TOKENS = (31, 17)
"""Tokens of the start-up proof's texts together, and of the longest."""

Measure = Callable[[PassKind, int, int], PassCost]
"""(kind, tokens of a pack, tokens of its longest segment) -> cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the formulas need. Example: `sizes_of(model, config).trained`."""

    all: int
    trained: int
    largest: int  # parameters of the largest weight
    layer: int  # parameters of the largest layer, or of embedding or head
    itemsize: int
    learner: LearnerConfig

    @property
    def ranks(self) -> int:
        """N."""
        return self.learner.num_ranks

    @property
    def is_split(self) -> bool:
        """Whether weights are divided among ranks."""
        return self.learner.zero_stage == 3

    @property
    def divisor(self) -> int:
        """D, of the optimizer's states."""
        return self.ranks if self.learner.zero_stage else 1

    @property
    def weights(self) -> int:
        """Bytes of the weights on one rank."""
        return self.itemsize * self.all // (self.ranks if self.is_split else 1)

    @property
    def optimizer(self) -> int:
        """Bytes of AdamW's states and of the float32 weights, wherever they are."""
        has_master = self.itemsize == 2 or self.learner.zero_stage > 0
        return (12 if has_master else 8) * self.trained // self.divisor

    @property
    def buffer(self) -> int:
        """Bytes of the gradients that stage 3 keeps room for."""
        return self.itemsize * self.trained // self.ranks if self.is_split else 0

    @property
    def gathered(self) -> int:
        """Bytes of weights that a pass gathers."""
        if not self.is_split or self.ranks == 1:
            return 0
        live, ahead = min(self.all, LIVE_ELEMENTS), min(self.all, PREFETCH_ELEMENTS)
        return self.itemsize * (live + ahead)


def pass_kinds(algorithm: AlgorithmConfig) -> tuple[PassKind, ...]:
    """The passes that each pack goes through, as trainer/gradient/step_gradient.py chooses them."""
    objective = make_objective(algorithm)
    if objective.needs_norms:
        return ("exact",) if algorithm.baseline_norms == "exact" else ("proxy", "plain")
    return ("forward", "plain") if objective.needs_batch else ("plain",)


def needs(config: Config, model: Any, measure: Measure) -> LearnerNeeds:
    """What one rank needs for `config`; `model` is that of `dry_pass.planned_model`."""
    kinds, longest = pass_kinds(config.algorithm), config.rollout.max_context
    num_tokens = max(config.learner.pack_tokens, longest)  # a longer trajectory has a pack of its own
    passes = tuple(measure(kind, num_tokens, longest) for kind in kinds)
    sizes = sizes_of(model, config)
    return LearnerNeeds(
        shape=shape_of(model),
        phases=phases(sizes, passes, proof=measure("exact", *PROOF_TOKENS), has_scores="exact" in kinds),
        passes=passes,
        kept=_kept(sizes),
    )


def sizes_of(model: Any, config: Config) -> Sizes:
    """The counts of a model, real or planned."""
    parameters = list(model.parameters())
    layers: Counter[str] = Counter()
    for name, one in model.named_parameters():
        layers[layer_of(name)] += one.numel()
    return Sizes(
        all=sum(one.numel() for one in parameters),
        trained=sum(one.numel() for one in parameters if one.requires_grad),
        largest=max(one.numel() for one in parameters),
        layer=max(layers.values()),
        itemsize=parameters[0].element_size(),
        learner=config.learner,
    )


def shape_of(model: Any) -> ModelShape:
    """The shape of a model, from its own config."""
    settings = model.config.get_text_config()
    sizes = [(one.numel(), one.requires_grad) for one in model.parameters()]
    return ModelShape(
        num_parameters=sum(size for size, _ in sizes),
        num_trained=sum(size for size, is_trained in sizes if is_trained),
        num_layers=settings.num_hidden_layers,
        num_kv_heads=getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads,
        head_size=head_size(settings),
        vocab_size=settings.vocab_size,
    )


def phases(sizes: Sizes, passes: tuple[PassCost, ...], *, proof: PassCost, has_scores: bool) -> tuple[Phase, ...]:
    """Every phase of a learner on one GPU, in the order of a run; those of a step are of the second and later ones.

    `proof` is the pass over the short texts of trainer/startup_proof.py.
    """
    kept = _kept(sizes)
    total = {"sums": 4 * sizes.trained}
    scores = {"scores": 4 * sizes.trained} if has_scores else {}
    whole = {"weights": sizes.itemsize * sizes.all}
    in_pass = max((one.peak_bytes for one in passes), default=0)
    largest = {"one weight": 4 * sizes.largest}
    return (
        Phase(name="load", parts=whole),
        Phase(name="prove", parts={**whole, **total, "pass": proof.peak_bytes}),
        Phase(name="start", parts=_start(sizes)),
        Phase(name="estimate", parts={**kept, **scores, **total, "gathered": sizes.gathered, "pass": in_pass}),
        Phase(name="hand-over", parts={**kept, **_handed(sizes), **largest}),
        Phase(name="step", parts={**kept, **_stepped(sizes)}),
        Phase(name="publish", parts={**kept, **_published(sizes), "checksum": CHECKSUM_BYTES}),
        Phase(name="checkpoint", parts=kept),
    )


def _kept(sizes: Sizes) -> dict[str, int]:
    """What exists between steps, and so in each phase of a step."""
    parts = {"weights": sizes.weights}
    if not sizes.learner.offload_optimizer:
        parts["optimizer"] = sizes.optimizer
        parts["buffer"] = sizes.buffer
    return {name: size for name, size in parts.items() if size}


def _start(sizes: Sizes) -> dict[str, int]:
    """DeepSpeed's start: it copies the weights into its buffers, then makes the float32 ones."""
    whole = sizes.itemsize * sizes.all
    copied = sizes.itemsize * sizes.all // (sizes.ranks if sizes.is_split else 1)
    if sizes.learner.zero_stage == 0:  # a step of zero gradient, where the weights have a float32 copy
        states = 22 * sizes.trained if sizes.itemsize == 2 else 0
    else:
        states = 0 if sizes.learner.offload_optimizer else 8 * sizes.trained // sizes.divisor
    if states + copied > whole + copied:
        one = {"one weight": sizes.itemsize * sizes.largest} if sizes.is_split else {}
        return {"weights": copied, "optimizer": states, **one}
    return {"weights": whole, "copy": copied} if sizes.learner.zero_stage else {"weights": whole}


def _published(sizes: Sizes) -> dict[str, int]:
    """Tensors leave one after the other; ZeRO-3 gathers a layer at a time, an adapter is added in float32."""
    merged = (8 + sizes.itemsize) * sizes.largest if sizes.trained < sizes.all else 0
    gathered = sizes.itemsize * sizes.layer if sizes.is_split and sizes.ranks > 1 else 0
    return {name: size for name, size in {"one layer": gathered, "one merged weight": merged}.items() if size}


def _handed(sizes: Sizes) -> dict[str, int]:
    """A sum exists until its gradient does. In stages 0 and 1 autograd and DeepSpeed each hold gradients to the end."""
    is_whole = sizes.learner.zero_stage < 2
    parts = {"sums": (max(4, 2 * sizes.itemsize) if is_whole else 4) * sizes.trained}
    if sizes.learner.zero_stage == 2:
        parts["gradients"] = sizes.itemsize * sizes.trained // sizes.ranks
    return parts


def _stepped(sizes: Sizes) -> dict[str, int]:
    at_once = sizes.trained // sizes.divisor
    if sizes.is_split:
        at_once = min(at_once, LIVE_ELEMENTS)
    if sizes.learner.offload_optimizer:
        return {"gradients": sizes.itemsize * sizes.trained // sizes.divisor}
    parts = {"gradients": 4 * at_once, "square roots": 4 * at_once}
    if sizes.learner.zero_stage == 0 and sizes.itemsize == 2:
        parts["handed gradients"] = sizes.itemsize * sizes.trained
    return parts
