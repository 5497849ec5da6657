"""What one rank needs of a GPU for a config, under each gradient method that the config allows.

Independent of GPUs, engines and of who asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from agentrl.cli.doctor.plan.records import GradientNeeds, LearnerNeeds, ModelShape, PassCost
from agentrl.config import Config
from agentrl.config.learner import GradientMethod
from trainer.gradient.attention import head_size
from trainer.gradient.method_choice import possible
from trainer.objective.registry import make_objective
from trainer.plan.dry_pass import PassKind
from trainer.plan.memory import Passes, Sizes, kept_parts, phases
from trainer.weights.source import layer_of

PROOF_TOKENS = (31, 17)
"""Tokens of the start-up proof's texts together, and of the longest."""

Measure = Callable[[Any, PassKind, int, int], PassCost]
"""(model, kind, tokens of a pack, tokens of its longest segment) -> cost."""


def needs(config: Config, model: Any, measure: Measure, *, reference: Any = None) -> LearnerNeeds:
    """What one rank needs for `config`.

    Args:
        model: that of `dry_pass.planned_model`.
        reference: the frozen second model, planned alike; None where the config has none, or it is the policy itself.
    """
    sizes = sizes_of(model, config, reference=reference)
    methods = (gradient_needs(config, name, model, measure, reference=reference) for name in possible(config))
    return LearnerNeeds(shape=shape_of(model), methods=tuple(methods), kept=kept_parts(sizes))


def gradient_needs(
    config: Config, method: GradientMethod, model: Any, measure: Measure, *, reference: Any = None
) -> GradientNeeds:
    """The phases and passes of one gradient method."""
    longest = config.rollout.max_context
    num_tokens = max(config.learner.pack_tokens, longest)  # a longer trajectory has a pack of its own
    num_mine = -(-num_tokens // config.learner.sequence_parallel)

    def cost(kind: PassKind) -> PassCost:
        return measure(model, kind, num_mine, min(longest, num_mine))

    *first, last = pass_kinds(config, method)
    before = tuple(cost(kind) for kind in first)
    scored = () if reference is None else (measure(reference, "forward", num_mine, min(longest, num_mine)),)
    sizes = sizes_of(model, config, reference=reference)
    sums = _sums(sizes, method, is_exact=last in ("exact", "sharded"))
    passes = Passes(
        proof=measure(model, "plain" if method == "plain" else "exact", *PROOF_TOKENS),
        norms=(*scored, *before),
        gradient=cost(last),
        sums=sums,
        handed_sums=min(sums, 4 * sizes.trained) if method == "one_pass" else sums // 2,
    )
    return GradientNeeds(method=method, phases=phases(sizes, passes), passes=(*passes.norms, passes.gradient))


def pass_kinds(config: Config, method: GradientMethod) -> tuple[PassKind, ...]:
    """The passes that each pack goes through. The last one makes the gradient."""
    objective, norms = make_objective(config.algorithm), config.algorithm.baseline_norms
    is_exact = objective.needs_norms and norms == "exact"
    match method:
        case "one_pass_sharded":
            return ("sharded",)
        case "two_pass":
            return ("norms" if is_exact else "proxy", "plain")
        case "one_pass" if objective.needs_norms:
            return ("exact",) if is_exact else ("proxy", "recorded")
        case _:
            last: PassKind = "plain" if method == "plain" else "recorded"
            return ("forward", last) if objective.needs_batch else (last,)


def _sums(sizes: Sizes, method: GradientMethod, *, is_exact: bool) -> int:
    """Bytes of the method's own sums on one rank."""
    match method:
        case "one_pass":
            return (8 if is_exact else 4) * sizes.trained
        case "one_pass_sharded":
            return 8 * sizes.trained // sizes.ranks + 4 * sizes.largest
        case _:
            return 0


def sizes_of(model: Any, config: Config, *, reference: Any = None) -> Sizes:
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
        reference=0 if reference is None else sum(one.nbytes for one in reference.parameters()),
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
