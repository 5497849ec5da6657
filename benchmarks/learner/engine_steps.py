"""The ways to a step's gradient that go through a DeepSpeed engine: two of the learner's methods, and a usual loop.

The loop is what one writes with Transformers and DeepSpeed alone: padded micro-batches, whole logits, GRPO's clipped
loss, `engine.backward(loss)`. ZeRO stage 0 and float32 on CPUs, stage 1 and bfloat16 on GPUs. All gradients point
uphill, one tensor a parameter. Shapes: _B rows of a micro-batch, _T tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.config import Config, parse
from trainer import ranks
from trainer.deepspeed_settings import start_engine
from trainer.gpu_report import methods, workload
from trainer.gpu_report.methods import CLIP, Step
from trainer.gpu_report.workload import Sample
from trainer.gradient import attention, handoff
from trainer.gradient.method_choice import make_method, possible

PLAIN_METHOD, TWO_PASS, LOOP = "ours, plain method", "vcpo two passes", "Transformers + DeepSpeed"
SETTINGS = {
    PLAIN_METHOD: ({"preset": "grpo"}, "plain"),
    TWO_PASS: ({"preset": "vcpo"}, "two_pass"),
    LOOP: ({"preset": "grpo"}, "auto"),
}
ROWS = 8


def make(name: str, model: Any, samples: Sequence[Sample]) -> Step:
    """The method of that name, which is one of `SETTINGS`."""
    algorithm, gradient = SETTINGS[name]
    config = parse(
        {
            "name": "benchmark",
            "env": {"target": "benchmark:None"},
            "model": {"path": model.config._name_or_path, "dtype": str(model.dtype).removeprefix("torch.")},
            "algorithm": algorithm,
            "learner": {"gradient": gradient, "pack_tokens": workload.pack_tokens(model.device), "zero_stage": 0},
        },
        source="benchmark",
    )
    return Loop(model, samples, config) if name == LOOP else Learned(model, samples, config)


class Learned:
    """The method of `config`, as the learner calls it."""

    def __init__(self, model: Any, samples: Sequence[Sample], config: Config) -> None:
        attention.install(model)
        self._engine = _engine(model, config)
        (method,) = possible(config)
        self._method = make_method(method, model, self._engine, config)
        self._groups, self._size = methods.groups(samples), len(samples)

    def __call__(self) -> list[Tensor]:
        """Make a step."""
        self._method.estimate(self._groups, policy_version=0, num_episodes=self._size)
        self._method.hand_over()
        return _taken(self._engine)


class Loop:
    """Padded rows through `engine`, one backward per micro-batch."""

    def __init__(self, model: Any, samples: Sequence[Sample], config: Config) -> None:
        self._engine = _engine(model, config)
        self._size, self._device = len(samples), model.device
        advantages = torch.tensor(workload.advantages(samples))
        rows = [slice(start, start + ROWS) for start in range(0, len(samples), ROWS)]
        self._batches = [(_padded(samples[at], model.device), advantages[at].to(model.device)) for at in rows]

    def __call__(self) -> list[Tensor]:
        """Make a step."""
        for number, ((ids_BT, mask_BT, acted_BT, behavior_BT), advantage_B) in enumerate(self._batches):
            self._engine.set_gradient_accumulation_boundary(number == len(self._batches) - 1)
            logits_BTV = self._engine(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits[:, :-1].float()
            chosen_BT = logits_BTV.gather(2, ids_BT[:, 1:, None])[:, :, 0]
            ratio_BT = (chosen_BT - logits_BTV.logsumexp(dim=2) - behavior_BT[:, 1:]).exp()
            clipped_BT = ratio_BT.clamp(1 - CLIP, 1 + CLIP)
            gain_BT = torch.minimum(ratio_BT * advantage_B[:, None], clipped_BT * advantage_B[:, None])
            is_action_BT = acted_BT[:, 1:]
            gain_B = (gain_BT * is_action_BT).sum(dim=1) / is_action_BT.sum(dim=1)
            self._engine.backward(-gain_B.sum() / self._size)
        return _taken(self._engine)


def _padded(samples: Sequence[Sample], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ids, attention mask, whether acted, behaviour log-probabilities), padded on the right. [B, T]"""
    columns = (
        [sample.ids_T for sample in samples],
        [torch.ones_like(sample.ids_T) for sample in samples],
        [sample.acted_T.long() for sample in samples],
        [sample.behavior_T.float() for sample in samples],
    )
    ids_BT, mask_BT, acted_BT, behavior_BT = (pad_sequence(one, batch_first=True).to(device) for one in columns)
    return ids_BT, mask_BT, acted_BT, behavior_BT


def _engine(model: Any, config: Config) -> Any:
    """One engine per model: its hooks stay on the weights."""
    return _started(model, config.model_dump_json())


@lru_cache(maxsize=1)
def _started(model: Any, config_json: str) -> Any:
    ranks.set_defaults(os.environ)
    ranks.join(timeout_s=600)
    return start_engine(model, Config.model_validate_json(config_json))


def _taken(engine: Any) -> list[Tensor]:
    """The gradients uphill; the engine then has none."""
    from deepspeed.utils import safe_get_full_grad

    gradients = [-safe_get_full_grad(parameter) for parameter in engine.module.parameters()]
    handoff.discard(engine)
    return gradients
