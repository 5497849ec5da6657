"""Log-probability and entropy of each action token under the model. Independent of rewards and weights.

The output head is applied to action positions only and in chunks, forward and backward: a whole [tokens, vocabulary]
tensor never exists. Logits are float32 whatever the model's type, as in the engine (vLLM's `head_dtype`): a bfloat16
logit of 30 is 0.125 wide.
Shapes: _N action tokens, _C tokens of a chunk, _V vocabulary, _D hidden size, _U ids of a segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.gradient import attention, sequence
from trainer.gradient.norms import row_squared_norms, row_sums
from trainer.gradient.recorded_modules import forwards
from trainer.gradient.recorder import Recorder
from trainer.gradient.sums import product
from trainer.packing import Pack

# Elements of a float32 chunk [tokens, vocabulary]: 64 MiB on a CPU; 1 GiB on a GPU, whose products need many rows.
CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28, "meta": 2**28}

CPU_WEIGHT_ELEMENTS = 2**22
"""Elements of a bfloat16 head that are converted to float32 at a time: 16 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Scores of a pack's action tokens, in nats: the result of `score`. float32.

    Example: `score(model, pack).logprob_N` holds log pi of each action token.
    """

    logprob_N: Tensor  # with its graph if a recorder was given
    entropy_N: Tensor
    sum_pi2_N: Tensor  # sum over the vocabulary of pi^2


def score(model: Any, pack: Pack, recorder: Recorder | None = None, *, chunk_tokens: int | None = None) -> TokenScores:
    """Score a pack in one forward.

    Under sequence parallelism every rank of a sequence group calls it with the same pack and gets the scores of all its
    actions; a backward with the same seeds on each of them leaves the gradient's parts by rank.

    Without a recorder there is no graph. With one, call this inside `recorded_modules.recording` with the same
    recorder: `torch.autograd.backward(logprob_N, seed_N)` then passes it every weight's pieces, including the head's.
    `chunk_tokens` limits the rows of a chunk.
    """
    head = model.get_output_embeddings()
    device = pack.input_ids_S.device
    rows = chunk_tokens or max(1, CHUNK_ELEMENTS[device.type] // head.out_features)
    found: list[Tensor] = []
    part = sequence.part_of(pack)

    def scored(hidden_1ND: Tensor) -> Tensor:
        logprob_N: Tensor
        logprob_N, *found[:] = _Head.apply(hidden_1ND[0], head, part.pack, rows, recorder)  # type: ignore[no-untyped-call]
        return logprob_N

    # Through the calls of the model and of its head: ZeRO-3 and PEFT hook into both.
    with torch.set_grad_enabled(recorder is not None), forwards([(head, scored)]):
        logprob_N = model(
            input_ids=part.pack.input_ids_S[None],
            position_ids=part.pack.position_ids_S[None],
            use_cache=False,  # with a cache object transformers would ignore the bounds of segments
            logits_to_keep=part.pack.predictor_N,
            **attention.segment_arguments(part.bounds, device),
        ).logits
        logprob_N, entropy_N, sum_pi2_N = (sequence.whole(one_N, part) for one_N in (logprob_N, *found))
    return TokenScores(logprob_N=logprob_N, entropy_N=entropy_N, sum_pi2_N=sum_pi2_N)


class _Head(torch.autograd.Function):
    """log softmax(h W^T) at the targets. Only the log-normalizer is kept; the backward recomputes the chunks."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head: nn.Linear, pack: Pack, rows: int, recorder: Recorder | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprob_N, entropy_N, sum_pi2_N, log_sum_N = torch.empty(4, len(hidden_ND), device=hidden_ND.device)
        for start in range(0, len(hidden_ND), rows):
            at = slice(start, start + rows)
            logits_CV = float32_logits(hidden_ND[at], head.weight)
            log_sum_N[at] = logits_CV.logsumexp(dim=-1)
            log_pi_CV = logits_CV.sub_(log_sum_N[at, None])
            logprob_N[at] = log_pi_CV.gather(1, pack.target_N[at, None])[:, 0]
            pi_CV = log_pi_CV.exp()
            sum_pi2_N[at] = row_squared_norms(pi_CV).float()
            entropy_N[at] = -row_sums(log_pi_CV.mul_(pi_CV)).float()
        # A single chunk is kept: it exists anyway, and the backward starts with the head.
        ctx.pi_CV = pi_CV if 0 < len(hidden_ND) <= rows else None
        ctx.save_for_backward(hidden_ND, log_sum_N)
        ctx.head, ctx.pack, ctx.rows, ctx.recorder = head, pack, rows, recorder
        ctx.mark_non_differentiable(entropy_N, sum_pi2_N)
        return logprob_N, entropy_N, sum_pi2_N

    @staticmethod
    def backward(ctx: Any, seed_N: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        hidden_ND, log_sum_N = ctx.saved_tensors
        pieces = _HeadPieces(ctx.head.weight, ctx.pack, ctx.recorder)
        grad_ND = torch.empty_like(hidden_ND)
        for at in _chunks(ctx.recorder.action_bounds, ctx.rows):
            pi_CV, ctx.pi_CV = ctx.pi_CV, None
            if pi_CV is None:
                pi_CV = float32_logits(hidden_ND[at], ctx.head.weight).sub_(log_sum_N[at, None]).exp_()
            grad_CV = pi_CV.mul_(-seed_N[at, None])
            grad_CV.scatter_add_(1, ctx.pack.target_N[at, None], seed_N[at, None])
            grad_CV = grad_CV.to(hidden_ND.dtype)
            grad_ND[at] = grad_CV @ ctx.head.weight
            pieces.add(at, grad_CV, hidden_ND[at])
        pieces.close()
        return grad_ND, None, None, None, None


def float32_logits(hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """h W^T with float32 results: products of bfloat16 numbers are exact in it, and their sums are not rounded to
    bfloat16. [C, V]"""
    if hidden_CD.dtype == torch.float32:
        return hidden_CD @ weight_VD.t()
    if hidden_CD.is_cuda:
        return torch.mm(hidden_CD, weight_VD.t(), out_dtype=torch.float32)
    # torch has no such product on CPUs; block by block, so that no float32 copy of the whole weight exists.
    rows = max(1, CPU_WEIGHT_ELEMENTS // weight_VD.shape[1])
    wide_CD = hidden_CD.float()
    logits_CV = wide_CD.new_empty(len(hidden_CD), len(weight_VD))
    for start in range(0, len(weight_VD), rows):
        at = slice(start, start + rows)
        logits_CV[:, at] = wide_CD @ weight_VD[at].float().t()
    return logits_CV


def _chunks(bounds: tuple[int, ...], rows: int) -> Iterator[slice]:
    """Slices of at most `rows` tokens, each of several whole segments or of a part of one."""
    start = 0
    for segment_start, segment_end in itertools.pairwise(bounds):
        if segment_end - start <= rows:
            continue
        if segment_start > start:
            yield slice(start, segment_start)
            start = segment_start
        while segment_end - start > rows:
            yield slice(start, start + rows)
            start += rows
    if bounds[-1] > start:
        yield slice(start, bounds[-1])


class _HeadPieces:
    """Cuts the head's gradient, which arrives in chunks, into one piece per segment."""

    def __init__(self, weight: Tensor, pack: Pack, recorder: Recorder) -> None:
        self._index = recorder.index_of(weight)
        self._pack, self._recorder = pack, recorder
        self._segment = 0
        self._piece: Tensor | None = None

    def add(self, at: slice, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """The next chunk."""
        recorder = self._recorder
        if self._index is None:
            return
        if not recorder.has_norms:
            return recorder.whole(self._index, grad_CV, hidden_CD)
        while self._segment < recorder.num_segments:
            start = max(at.start, recorder.action_bounds[self._segment])
            end = min(at.stop, recorder.action_bounds[self._segment + 1])
            inside = slice(start - at.start, end - at.start)
            self._grow(grad_CV[inside], hidden_CD[inside])
            if end < recorder.action_bounds[self._segment + 1]:
                return
            self._finish()

    def close(self) -> None:
        """There are no more chunks."""
        if self._index is not None:
            self._recorder.head_is_complete(self._index)

    def _grow(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        if self._piece is None:
            self._piece = product(grad_CV, hidden_CD)
        elif grad_CV.dtype == torch.float32:
            self._piece.addmm_(grad_CV.t(), hidden_CD)
        else:
            self._piece += product(grad_CV, hidden_CD)

    def _finish(self) -> None:
        assert self._piece is not None and self._index is not None
        start, end = self._recorder.bounds[self._segment : self._segment + 2]
        self._recorder.head(self._index, self._segment, self._piece, self._pack.input_ids_S[start:end])
        self._segment, self._piece = self._segment + 1, None
