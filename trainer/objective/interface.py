"""What an objective is: the interface between a rule and the passes that turn it into a gradient. Pure.

    g = 1/B sum_i 1/L_i sum_t (A_it w_it + e_it) grad log pi(a_it) + h_it grad H_it

B trajectories; A advantage, w weight, L length, e and h the seeds of further terms, H the entropy of the distribution
that token t was sampled from. A rule says what A, w, L, e and h are; all of them are constants in the gradient.
Independent of models, packing and DeepSpeed. docs/write-an-objective.md writes one.
Shapes: _E episodes of one group, _G its trajectories, _N action tokens of one trajectory. float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group before it is scored: what `Objective.advantages` is given.

    >>> Group(reward_E=torch.tensor([1.0, 0.0]), num_actions_E=torch.tensor([5, 7])).step
    0
    """

    reward_E: Tensor  # float64
    num_actions_E: Tensor  # int64, over all segments
    episodes: tuple[tuple[Trajectory, ...], ...] = ()  # the segments of each episode, with their turns and messages
    step: int = 0  # optimizer steps made before this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The turns of one trajectory. Shape: _K turns.

    >>> Turns(num_actions_K=torch.tensor([5, 2]), reward_K=torch.tensor([0.25, 1.0])).num_actions_K.tolist()
    [5, 2]
    """

    num_actions_K: Tensor  # int64, action tokens
    reward_K: Tensor  # float64; the last turn has all that is still to come, in later segments too


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One trajectory once it is scored: what `Objective.weights` is given.

    >>> Member(log_ratio_N=torch.zeros(2), advantage=0.5, reward=1.0, group=0).token_advantage_N.tolist()
    [0.5, 0.5]
    """

    log_ratio_N: Tensor  # float64, log pi - log mu
    advantage: float  # from `Objective.advantages`, the mean over its tokens; 0.0 where the group has no gradient
    reward: float
    group: int
    episode: int = 0  # the index in its group of the episode that it is, or is a segment of
    num_episodes: int = 0  # of its group, with those that have no action token; 0: only those that are given
    advantage_N: Tensor | None = None  # only where `advantages` gave one a token
    logprob_N: Tensor | None = None  # log pi
    entropy_N: Tensor | None = None  # in nats, of the distribution each token was sampled from
    logit_norm2_N: Tensor | None = None  # see baselines.logit_norm2; only where `needs_logits`
    reference_logprob_N: Tensor | None = None  # under the frozen model; only where `needs_reference`
    turns: Turns | None = None  # only where `needs_turns`
    step: int = 0  # optimizer steps made before this one

    @property
    def token_advantage_N(self) -> Tensor:
        """The advantage of each token. float64 [N]"""
        if self.advantage_N is not None:
            return self.advantage_N
        return torch.full(self.log_ratio_N.shape, self.advantage, dtype=torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberWeights:
    """One trajectory's weights and seeds: what `Objective.weights` returns.

    NaN or infinite entries refuse the step. Example: `MemberWeights.of(member, torch.ones_like(member.log_ratio_N))`.
    """

    weight_N: Tensor  # float64, multiplies the advantage; 0 where a token is masked or clipped away
    log_weight: float  # untruncated log of the sequence ratio, from which ESS and the largest weight are measured
    log_used: float  # log of the weight in use where the trajectory has one weight; else log of the mean of its weights
    num_clipped: int  # how many of its weights were truncated, masked or clipped
    num_weights: int  # its action tokens, or 1 where the whole sequence has one weight
    num_silenced: int = 0  # tokens left out because they are spurious (`algorithm.spurious`)
    logprob_seed_N: Tensor | None = None  # e; `Objective.terms` are added to it
    entropy_seed_N: Tensor | None = None  # h; likewise

    @classmethod
    def of(cls, member: Member, weight_N: Tensor, *, logprob_seed_N: Tensor | None = None) -> MemberWeights:
        """One weight per token. A weight of 0 counts as clipped in the metrics.

        >>> member = Member(log_ratio_N=torch.tensor([0.0, 1.0]), advantage=0.5, reward=1.0, group=0)
        >>> MemberWeights.of(member, torch.tensor([1.0, 0.0])).num_clipped
        1
        """
        return cls(
            weight_N=weight_N.double(),
            log_weight=float(member.log_ratio_N.double().sum()),
            log_used=float(weight_N.double().mean().clamp(min=0).log()) if len(weight_N) else 0.0,
            num_clipped=int((weight_N == 0).sum()),
            num_weights=len(weight_N),
            logprob_seed_N=logprob_seed_N,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Seeds of further terms of the loss for one trajectory: what `Objective.terms` returns.

    Example: `Terms(entropy_seed_N=torch.full_like(member.log_ratio_N, 0.01))` adds 0.01 times the mean entropy.
    """

    logprob_seed_N: Tensor | None = None  # e: d term / d log pi of each token
    entropy_seed_N: Tensor | None = None  # h: d term / d entropy of each token


class Objective(ABC):
    """A rule: advantages of a group, weights of its trajectories' tokens, further terms, and what it needs for them.

    Derive from it, or from `PolicyGradient` to change one part of a preset, and name the class in
    `algorithm.objective`. Its methods must not change their arguments, and must give the same result on every rank.

    Example::

        class Imitation(Objective):  # log-likelihood of the episodes that succeed
            def advantages(self, group):
                return (group.reward_E > 0).double()

            def weights(self, member):
                return MemberWeights.of(member, torch.ones_like(member.log_ratio_N))

    Args:
        algorithm: the config's section. A class's own settings are further keyword arguments of its constructor, which
            `algorithm.objective_kwargs` gives.
    """

    needs_norms: bool = False
    """Each trajectory's score norm is measured, and `baseline` called with the norms of its group."""
    has_own_baselines: bool = False
    """`baseline` gives each episode its own number: the norms must be known before the gradient is made
    (`learner.gradient: two_pass`)."""
    has_terms: bool = False
    """`terms` may return seeds, or weights or advantages may differ among a trajectory's tokens. Read where norms are
    needed only: they must then be known before the gradient is made."""
    needs_batch: bool = False
    """`batch_weights` is called with every trajectory of the step, once all are scored, in place of `weights`."""
    needs_logits: bool = False
    """`Member.logit_norm2_N` is given."""
    needs_turns: bool = False
    """`Member.turns` is given."""
    needs_reference: bool = False
    """`Member.reference_logprob_N` is given, from the frozen model of `model.reference`."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.algorithm = algorithm

    @property
    def needs_norms_first(self) -> bool:
        """Whether score norms are needed before the gradient is made (`learner.gradient: two_pass`)."""
        return self.needs_norms and (self.has_own_baselines or self.has_terms or self.needs_batch)

    @abstractmethod
    def advantages(self, group: Group) -> Tensor | Sequence[Tensor] | None:
        """A of each episode, [E]; or of each action token, one [N] per episode, its segments one after the other.

        None: the group has no gradient, and further terms have none in it either. Where norms are needed it is about
        the group's mean reward; `baseline` then moves it.
        """

    @abstractmethod
    def weights(self, member: Member) -> MemberWeights:
        """The weights of one trajectory by itself. Its log-ratio may be empty. Not called where `needs_batch`."""

    def batch_weights(self, members: Sequence[Member]) -> list[MemberWeights]:
        """The weights of all trajectories of the step, in the members' order; their groups are complete.

        By default those of `weights`. Called where `needs_batch`, and then on every rank with all ranks' trajectories.
        """
        return [self.weights(member) for member in members]

    def terms(self, member: Member) -> Terms | None:
        """Terms of the loss beside A w, such as a KL penalty; they are divided by B L too. None: there are none.

        Called for every trajectory with action tokens, also where the advantage is 0, but not where `advantages` is
        None.
        """
        return None

    def lengths(
        self, num_actions_G: Tensor, *, share_G: Tensor | None = None, num_episodes: int | None = None
    ) -> Tensor:
        """L / c, by which each trajectory's summed score is divided. float64 [G], never 0.

        With `normalize_by_length: group` it is the group's tokens over its episodes, for segments too, so that every
        token of the group has the same weight (DAPO, arXiv 2503.14476).

        Args:
            num_actions_G: action tokens of each trajectory.
            share_G: c, the share of each in its episode; 0 (masked) divides as 1. Default: all 1.
            num_episodes: default: the number of trajectories.
        """
        length_G = num_actions_G.double()
        share_G = torch.ones_like(length_G) if share_G is None else share_G.double()
        share_G = share_G.masked_fill(share_G == 0, 1.0)
        match self.algorithm.normalize_by_length:
            case False:
                return 1 / share_G
            case True:
                return length_G.clamp(min=1) / share_G
            case "group":
                return (length_G.sum().clamp(min=1) / max(1, num_episodes or len(length_G))).expand_as(length_G)

    def score_scale(self, reward_E: Tensor) -> float:
        """1/s, by which the advantages of a group were multiplied: what `baseline` moves is multiplied by it too."""
        return 1.0

    def log_in_baseline(self, weights: MemberWeights) -> float:
        """log of one trajectory's weight in `baseline`; -inf where the trajectory has no part in the gradient."""
        return weights.log_used

    def norm_in_baseline(self, score_norm: float, length: float) -> float:
        """One trajectory's norm in `baseline`, from that of its score divided by `length`."""
        return score_norm

    def baseline(self, log_weight_E: Tensor, score_norm_E: Tensor, reward_E: Tensor) -> Tensor | None:
        """The baseline of a group from `log_in_baseline` and the score norms; None for no gradient.

        A scalar; with `has_own_baselines` one number for each episode, [E].

        Called where `needs_norms`. Raises ValueError under an objective that has no such baseline.
        """
        raise ValueError(f"{type(self).__name__} has no baseline that depends on norms")


def by_group(members: Sequence[Member]) -> list[list[int]]:
    """Positions of the members of each group, for `batch_weights`.

    >>> one, other = (Member(log_ratio_N=torch.zeros(1), advantage=0.0, reward=0.0, group=g) for g in (7, 3))
    >>> by_group([one, other, one])
    [[1], [0, 2]]
    """
    found: dict[int, list[int]] = {}
    for position, member in enumerate(members):
        found.setdefault(member.group, []).append(position)
    return [found[group] for group in sorted(found)]
