"""What a model does to its logits after the output head: a factor (Cohere, Granite) or a soft cap (Gemma 2 and later).

The head is computed elsewhere, in chunks (logprobs.py), so this part of the model's forward is measured once: the head
is replaced by known numbers, and the model's own code shows what becomes of them. Independent of packs and gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from trainer.gradient.recorded_modules import forwards

_SMALL, _MIDDLE, _LARGE = 2.0**-10, 3.0, 2.0**40
_TOLERANCE = 1e-5
_found: WeakKeyDictionary[Any, LogitRule] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRule:
    """logit = scale * raw, or cap * tanh(scale * raw / cap).

    >>> LogitRule(scale=0.5, cap=None).applied(torch.tensor([4.0])).item()
    2.0
    """

    scale: float = 1.0
    cap: float | None = None

    def applied(self, raw: Tensor) -> Tensor:
        """The logits, in the memory of `raw`."""
        if self.scale != 1.0:
            raw.mul_(self.scale)
        return raw if self.cap is None else raw.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor | None:
        """d logit / d raw over the scale, of logits that were capped; None where it is 1."""
        return None if self.cap is None else 1 - (logits / self.cap).square_()


def logit_rule(model: Any) -> LogitRule:
    """The rule of this model, measured at the first call; under ZeRO-3 every rank must make that call.

    Raises ConfigError if what the model does to its logits is neither a factor nor a soft cap.
    """
    if model.device.type == "meta":  # a planned model has no numbers, and the rule takes no memory worth counting
        return LogitRule()
    if model not in _found:
        _found[model] = _measured(model)
    return _found[model]


def _measured(model: Any) -> LogitRule:
    head = model.get_output_embeddings()
    known = torch.tensor([_SMALL, _MIDDLE, _LARGE, 0.0], device=model.device)
    ids = torch.zeros(1, len(known), dtype=torch.int64, device=model.device)
    with torch.no_grad(), forwards([(head, lambda hidden: known[None, :, None].clone())]):
        logits = model(input_ids=ids, use_cache=False).logits.flatten().double()
    if logits.shape != known.shape:
        raise _unknown(model)
    small, middle, large, zero = logits.tolist()
    scale = small / _SMALL
    cap = None if math.isclose(large, scale * _LARGE, rel_tol=_TOLERANCE) else large
    expected = scale * _MIDDLE if cap is None else cap * math.tanh(scale * _MIDDLE / cap)
    if zero != 0 or not math.isclose(middle, expected, rel_tol=_TOLERANCE):
        raise _unknown(model)
    return LogitRule(scale=1.0 if math.isclose(scale, 1.0, rel_tol=_TOLERANCE) else scale, cap=cap)


def _unknown(model: Any) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} changes its logits after the output head in a way that this learner does not know: "
        "only a factor or a soft cap is supported; use another model"
    )
