"""Run under torchrun by test_divided_packs.py: each architecture with whole packs and with packs divided among ranks.

Rank 0 saves, by name, the largest differences of log-probabilities and of gradients, or why the model was refused.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from tests.trainer.test_architectures import PACKED, model_of
from tests.trainer.trainer_builders import episode
from trainer import ranks, startup_proof
from trainer.gradient.logprobs import score
from trainer.packing import Pack, action_tensors, join
from trainer.process_end import end_process


def main(out: Path) -> None:
    torch.set_num_threads(1)
    ranks.join(timeout_s=120, sequence_parallel=2)
    found = {name: differences(model_of(name, settings)) for name, settings in PACKED.items()}
    if ranks.is_first():
        out.write_text(json.dumps(found))
    ranks.leave()


def differences(model: Any) -> list[float] | str:
    try:
        startup_proof.prepare(model, is_recorded=False)
    except ConfigError as error:
        return str(error)
    texts = [episode(str(seed), reward=1.0, seed=seed, shape=((6, 9), (3, 4))) for seed in range(3)]
    pack = join([action_tensors(text, model.device) for text in texts])
    with ranks.without_sequence_groups():
        theirs_N, their_gradients = results(model, pack)
    ours_N, own_gradients = results(model, pack)
    for gradient in own_gradients:
        ranks.add_up(gradient)
    total = torch.cat([one.flatten() for one in their_gradients])
    difference = torch.cat([one.flatten() for one in own_gradients]) - total
    return [float((ours_N - theirs_N).abs().max()), float(difference.norm() / total.norm())]


def results(model: Any, pack: Pack) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities, and this rank's part of the gradient of their weighted sum."""
    model.zero_grad()
    logprob_N = score(model, pack, call=model).logprob_N
    (logprob_N * torch.linspace(-1, 2, len(logprob_N))).sum().backward()
    gradients = [weight.grad for weight in model.parameters() if weight.requires_grad]
    return logprob_N.detach(), [torch.zeros(1) if one is None else one.clone() for one in gradients]


if __name__ == "__main__":
    ranks.set_defaults(os.environ)
    main(Path(sys.argv[1]))
    end_process()
