"""Sequence parallelism: one pack's tokens divided among the ranks of a sequence group, so that long texts fit.

Every rank holds an equal run of a pack's tokens in all layers. Around attention, ranks exchange them for all tokens of
a part of the heads, and back: DeepSpeed-Ulysses (arXiv 2309.14509), by DeepSpeed's own `UlyssesSPAttentionHF` (arXiv
2506.13996). The exchange's backward is its transpose, so the sum over ranks of a weight's gradients is its gradient.

Independent of kernels of attention, of heads and of objectives. Shapes: _S tokens of a pack, _N its action tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.errors import ConfigError
from trainer import ranks
from trainer.packing import Pack

Attend = Callable[..., tuple[Tensor, None]]
"""An attention function of transformers: (module, query, key, value, mask, **others) -> (output, no weights)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank computes of a pack; `part_of` makes it.

    Example: of a pack with 10 tokens, rank 1 of 2 has `part.pack.input_ids_S` = the last 5 of them.
    """

    pack: Pack  # this rank's tokens and actions; segments without any are empty
    whole: Pack  # prolonged to a length that the ranks divide
    action_cuts: tuple[int, ...]  # [ranks + 1] rank r has the pack's actions [action_cuts[r], action_cuts[r + 1])

    @property
    def own_actions(self) -> tuple[int, int]:
        """Where this rank's actions are in the pack."""
        start, end = self.action_cuts[ranks.sequence_index() :][:2]
        return start, end


def part_of(pack: Pack) -> Part:
    """This rank's part of a pack; all of it without sequence parallelism."""
    return cut(pack, index=ranks.sequence_index(), size=ranks.sequence_count())


def cut(pack: Pack, *, index: int, size: int) -> Part:
    """The part of rank `index` of `size`.

    The parts have equal lengths: the last segment is prolonged by tokens behind its last action, which change nothing.
    """
    if size == 1:
        return Part(pack=pack, whole=pack, action_cuts=(0, len(pack.predictor_N)))
    length = -(-pack.bounds[-1] // size)
    missing = length * size - pack.bounds[-1]
    starts = torch.arange(size + 1, device=pack.predictor_N.device) * length
    cuts: list[int] = torch.searchsorted(pack.predictor_N, starts).tolist()
    tokens, actions = slice(index * length, (index + 1) * length), slice(*cuts[index : index + 2])
    whole = replace(
        pack,
        input_ids_S=F.pad(pack.input_ids_S, (0, missing)),
        position_ids_S=F.pad(pack.position_ids_S, (0, missing)),
        bounds=(*pack.bounds[:-1], length * size),
    )
    mine = Pack(
        input_ids_S=whole.input_ids_S[tokens],
        position_ids_S=whole.position_ids_S[tokens],
        bounds=_clipped(whole.bounds, tokens),
        predictor_N=pack.predictor_N[actions] - tokens.start,
        target_N=pack.target_N[actions],
        action_bounds=_clipped(pack.action_bounds, actions),
    )
    return Part(pack=mine, whole=whole, action_cuts=tuple(cuts))


def whole(values_N: Tensor, part: Part) -> Tensor:
    """Values of this rank's actions -> those of all actions of the pack, on every rank.

    Backward: each rank's own values get their part of the gradient, which must be the same on every rank.
    """
    if len(part.action_cuts) == 2:
        return values_N
    result: Tensor = _Whole.apply(values_N, part)  # type: ignore[no-untyped-call]
    return result


def all_actions(values_N: Tensor, part: Part) -> Tensor:
    """Values of this rank's actions -> those of all actions of the pack, without a graph."""
    return ranks.rows_of_sequence(values_N, [end - start for start, end in pairwise(part.action_cuts)])


def all_tokens(rows_RD: Tensor) -> Tensor:
    """The rows of all tokens, from those of this rank's tokens; each rank has equally many."""
    return ranks.rows_of_sequence(rows_RD, [len(rows_RD)] * ranks.sequence_count())


def all_tokens_of_columns(rows_RD: Tensor) -> Tensor:
    """The rows of all tokens, each cut to this rank's columns: `own_columns` of them, without gathering the others."""
    size = ranks.sequence_count()
    parts = [own_columns(rows_RD, index=index) for index in range(size)]
    return ranks.exchanged_in_sequence(torch.stack(parts)).flatten(0, 1)


def own_columns(rows_RD: Tensor, *, index: int | None = None) -> Tensor:
    """The columns of rank `index` of its sequence group, by default this rank. The last ones may be zeros."""
    index = ranks.sequence_index() if index is None else index
    width = -(-rows_RD.shape[1] // ranks.sequence_count())
    found = rows_RD[:, index * width : (index + 1) * width]
    return F.pad(found, (0, width - found.shape[1]))


def check_heads(config: Any) -> None:
    """Raise ConfigError if this model's heads cannot be divided among the ranks of a sequence group."""
    size, heads = ranks.sequence_count(), config.get_text_config()
    num_queries = heads.num_attention_heads
    num_keys = getattr(heads, "num_key_value_heads", None) or num_queries
    if num_queries % size or (num_keys % size and size % num_keys):
        raise ConfigError(
            f"learner.sequence_parallel={size} must divide the model's {num_queries} attention heads, and divide its "
            f"{num_keys} key-value heads or be a multiple of them"
        )


def attend(core: Attend, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Any:
    """`core`, given all tokens of a part of the heads, and these heads' sinks (`s_aux`).

    Arguments and result as those of every attention of transformers.
    """
    if query.shape[-1] != key.shape[-1] or key.shape != value.shape:
        raise ConfigError(f"{type(module).__name__}: sequence parallelism needs heads of one size")
    exchange = _exchange(query.shape[1], key.shape[1], query.shape[3], ranks.sequence_group())
    # DeepSpeed gathers position ids for kernels that read them; ours has the bounds of segments instead.
    others["position_ids"] = torch.zeros(1, 1, dtype=torch.int64, device=query.device)
    if (sink_H := others.get("s_aux")) is not None:
        others["s_aux"] = sink_H.chunk(ranks.sequence_count())[ranks.sequence_index()]
    exchange.attn = core
    return exchange(module, query, key, value, None, **others)


@lru_cache(maxsize=16)
def _exchange(num_queries: int, num_keys: int, head_size: int, group: Any) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF(
        attn=None,
        batch_size=1,
        attn_head_count=num_queries,
        attn_head_size=head_size,
        kv_head_count=num_keys,
        num_hidden_layers=1,  # for its debugging mode only
        process_group=group,
        seq_length_is_variable=True,
    )


def _clipped(bounds: tuple[int, ...], to: slice) -> tuple[int, ...]:
    return tuple(min(max(bound, to.start), to.stop) - to.start for bound in bounds)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_N: Tensor, part: Part) -> Tensor:
        ctx.own = slice(*part.own_actions)
        return all_actions(values_N, part)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        return grad_N[ctx.own], None
