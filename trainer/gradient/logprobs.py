"""Log-probability and entropy of each action token under the model. Independent of rewards and weights.

The output head is applied to action positions only and in chunks, forward and backward: a whole [tokens, vocabulary]
tensor never exists. Logits are float32 whatever the model's type, as in the engine (vLLM's `head_dtype`): a bfloat16
logit of 30 is 0.125 wide.
Shapes: _N action tokens, _C tokens of a chunk, _V vocabulary, _D hidden size, _U ids of a segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.gradient import attention, sequence
from trainer.gradient.head_pieces import HeadPieces
from trainer.gradient.logit_rule import LogitRule, logit_rule
from trainer.gradient.norms import row_squared_norms, row_sums
from trainer.gradient.recorded_modules import forwards
from trainer.gradient.recorder import Recorder
from trainer.gradient.sequence import Part
from trainer.gradient.sums import grown
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

    logprob_N: Tensor  # with its graph if a recorder or a call was given
    entropy_N: Tensor  # likewise
    sum_pi2_N: Tensor  # sum over the vocabulary of pi^2


def score(
    model: Any,
    pack: Pack,
    recorder: Recorder | None = None,
    *,
    call: Callable[..., Any] | None = None,
    chunk_tokens: int | None = None,
) -> TokenScores:
    """Score a pack in one forward.

    Under sequence parallelism every rank of a sequence group calls it with the same pack and gets the scores of all its
    actions; a backward with the same seeds on each of them leaves the gradient's parts by rank.

    Without a recorder and a `call` there is no graph. With a recorder, call this inside `recorded_modules.recording`
    with the same recorder: `torch.autograd.backward(logprob_N, seed_N)` then passes it every weight's pieces, including
    the head's. With a `call` (the model, or DeepSpeed's engine around it) autograd makes the weights' gradients.
    Seeds of the entropy go into the same backward: `backward([logprob_N, entropy_N], [seed_N, entropy_seed_N])`.
    `chunk_tokens` limits the rows of a chunk.
    """
    head = model.get_output_embeddings()
    device = pack.input_ids_S.device
    rows = chunk_tokens or max(1, CHUNK_ELEMENTS[device.type] // head.out_features)
    found: list[Tensor] = []
    part = sequence.part_of(pack)
    rule = logit_rule(model)

    def scored(hidden_1ND: Tensor) -> Tensor:
        own = (head.weight, head.bias) if recorder is None else (None, None)
        found[:] = _Head.apply(hidden_1ND[0], *own, head, part, rows, recorder, rule)  # type: ignore[no-untyped-call]
        # Zeros on the same graph: the model changes its logits after the head, which _Head has done already.
        return found[0].nan_to_num(0, 0, 0)[None, :, None] * 0

    # Through the calls of the model and of its head: ZeRO-3 and PEFT hook into both, and into their outputs' backward.
    has_graph = recorder is not None or call is not None
    with torch.set_grad_enabled(has_graph), forwards([(head, scored)]):
        zero_1N1 = (call or model)(
            input_ids=part.pack.input_ids_S[None],
            use_cache=False,  # with a cache object transformers would ignore the bounds of segments
            logits_to_keep=part.pack.predictor_N,
            **(_of_segments(part, device) if attention.is_installed(model) else _of_one_text(part)),
        ).logits
        found[0] = found[0] + zero_1N1.flatten()
        logprob_N, entropy_N, sum_pi2_N = (sequence.whole(one_N, part) for one_N in found)
    return TokenScores(logprob_N=logprob_N, entropy_N=entropy_N, sum_pi2_N=sum_pi2_N)


def _of_segments(part: sequence.Part, device: torch.device) -> dict[str, Any]:
    return {
        "position_ids": part.pack.position_ids_S[None],
        **attention.segment_arguments(part.whole.bounds, device),
    }


def _of_one_text(part: sequence.Part) -> dict[str, Any]:
    """A model with its own attention is given a text alone."""
    assert part.pack.num_segments == 1, "this model reads one text at a time: attention.install was not called"
    return {}


class _Head(torch.autograd.Function):
    """log softmax of the head's logits at the targets. The backward recomputes the chunks.

    `weight` and `bias` are the head's where autograd makes their gradients, and None where a recorder gets them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        head: nn.Linear,
        part: Part,
        rows: int,
        recorder: Recorder | None,
        rule: LogitRule,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprob_N, entropy_N, sum_pi2_N, log_sum_N = torch.empty(4, len(hidden_ND), device=hidden_ND.device)
        for start in range(0, len(hidden_ND), rows):
            at = slice(start, start + rows)
            logits_CV = rule.applied(_raw_logits(hidden_ND[at], head))
            log_sum_N[at] = logits_CV.logsumexp(dim=-1)
            log_pi_CV = logits_CV.sub_(log_sum_N[at, None])
            logprob_N[at] = log_pi_CV.gather(1, part.pack.target_N[at, None])[:, 0]
            pi_CV = log_pi_CV.exp()
            sum_pi2_N[at] = row_squared_norms(pi_CV).float()
            entropy_N[at] = -row_sums(log_pi_CV.mul_(pi_CV)).float()
        # A single chunk is kept: it exists anyway, and the backward starts with the head.
        ctx.pi_CV = pi_CV if rule.cap is None and 0 < len(hidden_ND) <= rows else None
        ctx.save_for_backward(hidden_ND, log_sum_N, entropy_N)
        ctx.head, ctx.part, ctx.rows, ctx.recorder, ctx.rule = head, part, rows, recorder, rule
        ctx.mark_non_differentiable(sum_pi2_N)
        ctx.set_materialize_grads(False)  # None in place of zeros: entropies have seeds in few objectives
        return logprob_N, entropy_N, sum_pi2_N

    @staticmethod
    def backward(ctx: Any, seed_N: Tensor, entropy_seed_N: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        hidden_ND, log_sum_N, entropy_N = ctx.saved_tensors
        head, part, recorder, rule = ctx.head, ctx.part, ctx.recorder, ctx.rule
        pack, mine = part.pack, slice(None)
        if recorder is not None and recorder.has_all_tokens:
            pack, mine, ctx.pi_CV = part.whole, slice(*part.own_actions), None
            hidden_ND, log_sum_N, seed_N = (
                sequence.all_actions(one_N, part) for one_N in (hidden_ND, log_sum_N, seed_N)
            )
        pieces = None if recorder is None else HeadPieces(recorder, head.weight, pack.input_ids_S, rows=ctx.rows)
        own = _OwnGradients(*ctx.needs_input_grad[1:3])
        grad_ND = torch.empty_like(hidden_ND)
        bounds = (0, len(hidden_ND)) if recorder is None else recorder.action_bounds
        for at in _chunks(bounds, ctx.rows):
            pi_CV, ctx.pi_CV = ctx.pi_CV, None
            slope_CV = None
            if pi_CV is None:
                logits_CV = rule.applied(_raw_logits(hidden_ND[at], head))
                slope_CV = rule.slope(logits_CV)
                pi_CV = logits_CV.sub_(log_sum_N[at, None]).exp_()
            entropy_CV = None if entropy_seed_N is None else _entropy_gradient(pi_CV, entropy_N[at], entropy_seed_N[at])
            grad_CV = pi_CV.mul_(-seed_N[at, None])
            grad_CV.scatter_add_(1, pack.target_N[at, None], seed_N[at, None])
            if entropy_CV is not None:
                grad_CV += entropy_CV
            if slope_CV is not None:
                grad_CV *= slope_CV
            if rule.scale != 1.0:
                grad_CV *= rule.scale
            grad_CV = grad_CV.to(hidden_ND.dtype)
            grad_ND[at] = grad_CV @ head.weight
            own.add(grad_CV, hidden_ND[at])
            if pieces is not None:
                hidden_CD = hidden_ND[at]
                pieces.add(at, grad_CV, sequence.own_columns(hidden_CD) if recorder.has_all_tokens else hidden_CD)
        if pieces is not None:
            pieces.close()
        return (grad_ND[mine], *own.of(head), None, None, None, None, None)


def _entropy_gradient(pi_CV: Tensor, entropy_C: Tensor, seed_C: Tensor) -> Tensor:
    """seed * d H / d logits = -seed * pi (log pi + H). [C, V]"""
    return torch.xlogy(pi_CV, pi_CV).addcmul_(pi_CV, entropy_C[:, None]).mul_(-seed_C[:, None])


def _raw_logits(hidden_CD: Tensor, head: nn.Linear) -> Tensor:
    """The head's output in float32, in memory of its own. [C, V]"""
    logits_CV = float32_logits(hidden_CD, head.weight)
    return logits_CV if head.bias is None else logits_CV.add_(head.bias.float())


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
    """Slices of at most `rows` tokens, each of several whole segments or of a part of one.

    One empty slice where there are no tokens, as on a rank that has none of a divided pack's actions: the head's
    gradient is zero there, and not missing, since the ranks reduce it together.
    """
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
    if bounds[-1] > start or bounds[-1] == 0:
        yield slice(start, bounds[-1])


class _OwnGradients:
    """The head's gradients for autograd, which arrive in chunks. They are summed in float32."""

    def __init__(self, has_weight: bool, has_bias: bool) -> None:
        self._has_weight, self._has_bias = has_weight, has_bias
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def add(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """The next chunk."""
        if self._has_weight:
            self._weight = grown(self._weight, grad_CV, hidden_CD)
        if self._has_bias:
            part_V = grad_CV.sum(dim=0, dtype=torch.float32)
            self._bias = part_V if self._bias is None else self._bias.add_(part_V)

    def of(self, head: nn.Linear) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias, in the head's type; None where none is wanted or there was no token."""
        found = (self._weight, self._bias)
        weight, bias = (None if one is None else one.to(head.weight.dtype) for one in found)
        return weight, bias
