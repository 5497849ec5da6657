"""One pack through the model: scored only, or scored and differentiated in one of three ways.

What a pass measures is written into the pack's `ScoredTrajectory` records. Weights and advantages are plain numbers
here.
Shapes: _N action tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer import packing, ranks
from trainer.gradient import sequence
from trainer.gradient.divided_recorder import DividedRecorder
from trainer.gradient.logprobs import TokenScores, score
from trainer.gradient.recorded_modules import recording, tied_weight
from trainer.gradient.recorder import Recorder
from trainer.gradient.scored import ScoredTrajectory
from trainer.gradient.sums import GradientSums, NoSums
from trainer.objective import baselines
from trainer.packing import Pack

Weigh = Callable[[ScoredTrajectory], None]
"""Sets a trajectory's weights, from the log-ratios that the forward left in it."""


class Passes:
    """Passes over packs of trajectories of one model, into one `GradientSums`. Every trajectory needs an action token.

    An empty pack makes a pass too, over a dummy text that leaves nothing in the sums: where ZeRO-3 divides the weights
    among ranks, all of them must make the same number of passes.

    Example::

        passes = Passes(model, sums)
        passes.plain(pack, weigh, num_episodes=64)  # sums.total now holds the pack's share of the gradient
    """

    def __init__(self, model: Any, sums: GradientSums) -> None:
        self._model = model
        self._sums = sums
        self._tied_weight = tied_weight(model)

    def forward_only(self, members: Sequence[ScoredTrajectory]) -> None:
        """Score the pack."""
        self._score(members, self._join(members), None)

    def plain(self, members: Sequence[ScoredTrajectory], weigh: Weigh, *, num_episodes: int) -> None:
        """Score, then total += sum_i sum_t seed_it score_it, as one piece per weight, and the entropies' part."""
        pack = self._join(members)
        recorder = self._recorder(pack, is_split=False, sums=self._sums if members else None)
        with recording(self._model, recorder):
            scores = self._score(members, pack, recorder)
            for one in members:
                weigh(one)
            weighted(scores, members, num_episodes=num_episodes).backward()  # type: ignore[no-untyped-call]

    def with_norms(self, members: Sequence[ScoredTrajectory], weigh: Weigh, *, num_episodes: int) -> None:
        """The same for one weight per trajectory; also its score norm, and scores += w_i / (s B L_i) score_i."""
        # Segments of one weight follow one another, so that they make one product; in them, those of one length.
        members = sorted(members, key=lambda one: (one.advantage or 0.0, one.tensors.num_read))
        pack = self._join(members)
        recorder = self._recorder(pack, is_split=True, sums=self._sums)
        with recording(self._model, recorder):
            scores = self._score(members, pack, recorder)
            for one in members:
                weigh(one)
            recorder.weigh(
                # Equal for equal rewards to the last bit, which coefficient / score is not.
                # Without members the pass adds zeros: every rank makes the same calls (see ShardedSums).
                ratio_n=[(one.advantage or 0.0) / one.score_scale for one in members] or [0.0],
                score_n=[_score_weight(one, num_episodes) for one in members] or [0.0],
            )
            seeds = zip(_unit_seeds(members), recorder.weights.seed_n, strict=False)  # a dummy text has no member
            _backward(scores, [unit_N * seed for unit_N, seed in seeds])
        _keep_norms(members, recorder)

    def exact_norms(self, members: Sequence[ScoredTrajectory]) -> None:
        """Score, and a backward that measures the score norms and keeps no gradient."""
        self._norms(members, NoSums(self._sums.parameters))

    def proxy_norms(self, members: Sequence[ScoredTrajectory]) -> None:
        """Score, and a backward that measures the score norms of the normalization scales only."""
        self._norms(members, None)

    def _norms(self, members: Sequence[ScoredTrajectory], sums: GradientSums | None) -> None:
        pack = self._join(members)
        recorder = self._recorder(pack, is_split=True, sums=sums)
        with recording(self._model, recorder):
            scores = self._score(members, pack, recorder)
            _backward(scores, _unit_seeds(members))
        _keep_norms(members, recorder)

    def _join(self, members: Sequence[ScoredTrajectory]) -> Pack:
        return packing.join([one.tensors for one in members] or [packing.shortest(self._model.device)])

    def _recorder(self, pack: Pack, *, is_split: bool, sums: GradientSums | None) -> Recorder:
        part = sequence.part_of(pack)
        is_whole = is_split and ranks.sequence_count() > 1
        pack = part.whole if is_whole else part.pack
        return (DividedRecorder if is_whole else Recorder)(
            sums,
            bounds=pack.bounds if is_split else (0, pack.bounds[-1]),
            action_bounds=pack.action_bounds if is_split else (0, pack.action_bounds[-1]),
            has_norms=is_split,
            tied_weight=self._tied_weight,
            device=pack.input_ids_S.device,
        )

    def _score(
        self,
        members: Sequence[ScoredTrajectory],
        pack: Pack,
        recorder: Recorder | None,
        *,
        call: Callable[..., Any] | None = None,
    ) -> TokenScores:
        """Scores of the pack's action tokens, with their graph where `logprobs.score` makes one."""
        scores = score(self._model, pack, recorder, call=call)
        columns = (scores.logprob_N.detach(), scores.entropy_N.detach(), scores.sum_pi2_N)
        per_member = pack.per_segment(torch.stack(columns, dim=1).cpu().double())
        for one, scores_N3 in zip(members, per_member, strict=False):  # a dummy text has no member
            logprob_N, entropy_N, sum_pi2_N = scores_N3.unbind(dim=1)
            one.log_ratio_N = logprob_N - one.tensors.behavior_logprob_N
            one.logit_norm2_N = baselines.logit_norm2(logprob_N, sum_pi2_N)
            one.entropy_N = entropy_N
        return scores


def _score_weight(one: ScoredTrajectory, num_episodes: int) -> float:
    """w / (s B); 0 where the weight is not finite, for which the step is refused."""
    score = one.weight * one.score_scale / num_episodes
    return score if math.isfinite(score) else 0.0


def _unit_seeds(members: Sequence[ScoredTrajectory]) -> list[Tensor]:
    return [torch.full((one.tensors.num_actions,), 1 / one.length) for one in members]


def weighted(scores: TokenScores, members: Sequence[ScoredTrajectory], *, num_episodes: int) -> Tensor:
    """sum seed log pi + sum entropy seed * entropy over the pack's tokens, whose gradient is the pack's share of g.

    0, on the same graph, of a pack without trajectories.
    """
    if not members:
        return scores.logprob_N.sum() * 0
    seed_N = torch.cat([one.seed_N(num_episodes) for one in members]).to(scores.logprob_N)
    total = (seed_N * scores.logprob_N).sum()
    if all(one.used.entropy_seed_N is None for one in members):
        return total
    entropy_seed_N = torch.cat([one.entropy_seed_N(num_episodes) for one in members])
    return total + (entropy_seed_N.to(scores.entropy_N) * scores.entropy_N).sum()


def _backward(scores: TokenScores, seeds: list[Tensor]) -> None:
    seed_N = torch.cat(seeds) if seeds else torch.zeros(len(scores.logprob_N))
    torch.autograd.backward(scores.logprob_N, seed_N.to(scores.logprob_N))


def _keep_norms(members: Sequence[ScoredTrajectory], recorder: Recorder) -> None:
    for one, norm2 in zip(members, recorder.norm2_n.tolist(), strict=False):  # a dummy text has no member
        # Rounding may leave a tiny negative square where a tied embedding's cross term cancels; NaN stays NaN.
        one.score_norm = 0.0 if norm2 < 0 else math.sqrt(norm2)
