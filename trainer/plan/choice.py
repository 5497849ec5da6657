"""Which gradient method a learner uses: the first of the possible ones that fits into its GPU by the memory formula.

Independent of how the methods work.
"""

from __future__ import annotations

import logging

from agentrl.config import Config
from agentrl.config.learner import GradientMethod
from agentrl.engine.memory import FRAGMENTATION
from trainer.gradient.method_choice import possible
from trainer.plan import dry_pass
from trainer.plan.needs import gradient_needs

log = logging.getLogger(__name__)


def choose(config: Config, gpu_bytes: int | None) -> GradientMethod:
    """The method for a learner whose tensors may take `gpu_bytes`; None: memory is no limit, as on a CPU.

    The smallest one where none fits. Raises ConfigError where no method can make the objective's gradient.

    Example: `choose(config, 80 * 10**9)`.
    """
    methods = possible(config)
    chosen, why = methods[0], ""
    if len(methods) > 1 and gpu_bytes is not None:
        chosen, why = _first_that_fits(config, methods, gpu_bytes)
    log.info("learner.gradient: %s%s", chosen, why)
    return chosen


def _first_that_fits(config: Config, methods: tuple[GradientMethod, ...], gpu_bytes: int) -> tuple[GradientMethod, str]:
    settings = dry_pass.settings_of(config, None)
    model, reference = dry_pass.planned_model(config, settings), dry_pass.planned_reference(config, settings)
    said = []
    for method in methods:
        needs = gradient_needs(config, method, model, dry_pass.measure, reference=reference)
        peak = round(needs.peak_bytes * (1 + FRAGMENTATION))
        said.append(f"{method} {peak / 1e9:.3g} GB")
        if peak <= gpu_bytes:
            break
    return method, f" (auto; {gpu_bytes / 1e9:.3g} GB for its tensors: {', '.join(said)})"
