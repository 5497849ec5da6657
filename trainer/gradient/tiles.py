"""MLPs computed in parts of a pack, so that the memory of their wide hidden layer is that of one part.

ALST's tiled MLP (arXiv 2506.13996) by torch's own checkpoints: each part keeps its input only and is computed again in
the backward, where autograd adds up the weights' gradients as usual. A pass that is recorded
(trainer/gradient/recorded_modules.py) computes whole MLPs instead: its pieces of a gradient are cut at the bounds of
segments, which a part does not know.

Independent of layers, packs and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentrl.errors import ConfigError


@dataclass(frozen=True)
class Tiled:
    """A forward in parts: what `tile_mlps` sets as a module's forward. Shapes: [1, S, D] -> [1, S, D].

    Example: `Tiled(torch.relu, 4)(hidden)` equals `torch.relu(hidden)`.
    """

    whole: Callable[[Tensor], Tensor]
    num_tiles: int

    def __call__(self, hidden: Tensor) -> Tensor:
        """Always the same number of parts, empty ones too: where ZeRO-3 divides the weights, each part gathers them,
        and every rank must do so equally often."""
        parts = torch.tensor_split(hidden, self.num_tiles, dim=-2)
        outputs: list[Tensor] = [
            checkpoint(self.whole, part, use_reentrant=False, preserve_rng_state=False) for part in parts
        ]
        return torch.cat(outputs, dim=-2)


def tile_mlps(model: Any, num_tiles: int) -> None:
    """Compute every MLP of `model` in `num_tiles` parts. Raises ConfigError if it has none.

    MLPs are the modules named `mlp` with a `down_proj`, as transformers names them; a mixture of experts is left whole,
    because its experts already see a part of the tokens each.
    """
    found = [module for name, module in model.named_modules() if name.endswith(".mlp") and _is_dense(module)]
    if not found:
        raise ConfigError(f"learner.mlp_tiles={num_tiles}: {type(model).__name__} has no MLP to divide; set 1")
    for module in found:
        module.forward = Tiled(module.forward, num_tiles)


def _is_dense(module: nn.Module) -> bool:
    return isinstance(getattr(module, "down_proj", None), nn.Module)
