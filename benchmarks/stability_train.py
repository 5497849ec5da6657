"""Trains S runs of the calculator task at once under a fixed lag, with the project's own objective for every weight.

The policies' arithmetic is stacked (stability_policy.py); weights, advantages and baselines come from
`trainer.objective.PolicyGradient`, run by run. Groups that have no gradient are scored for rho but not differentiated.

Independent of sweeps and of the verdicts on runs.
Shapes: _S runs, _U distinct episodes of a run, _A groups with a gradient, _N distinct episodes of such a group, _G
members of a group, _B episodes of a run, _T tokens, _P parameters.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from agentrl.report.statistics import has_spread
from benchmarks import calculator
from benchmarks.calculator import MAX_TOKENS, warm_start
from benchmarks.stability_payment import Payment, paid
from benchmarks.stability_policy import AdamW, RowGradients, Scored, stacked
from benchmarks.stability_rollout import Episodes, Ints, rollout
from benchmarks.stability_rules import RULES, Rule
from trainer.objective import Group, Member, MemberWeights, make_objective, vcpo

NUM_TASKS, GROUP_SIZE = 8, 8
NUM_EPISODES = NUM_TASKS * GROUP_SIZE
CLIP = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One run: a rule, or two with the step at which the second takes over.

    When the second is the first, the run goes on with other random numbers: the control for a change of rule.
    """

    rule: str
    lag: int
    seed: int
    lr: float
    num_steps: int
    then: str | None = None
    switch_at: int = 0
    payment: Payment = "binary"

    def __post_init__(self) -> None:
        treatment = RULES[self.rule].algorithm.treatment
        if self.payment == "noisy" and treatment not in ("none", "truncate"):
            raise ValueError(f"rule {self.rule}: equal episodes with unequal rewards have one weight only")

    def rule_at(self, step: int) -> Rule:
        """The rule of this step."""
        return RULES[self.then if self.then is not None and step >= self.switch_at else self.rule]


@dataclass(kw_only=True, slots=True)
class Step:
    """The measurements of one training step."""

    reward: float = 0.0  # of the weights that sampled, `lag` steps old
    rho: float = 1.0
    mean_weight: float = 1.0
    max_weight: float = 1.0
    grad_norm: float = 0.0
    variance: float = 0.0  # trace of the covariance of the step's gradient, from its groups
    shift: float = 0.0  # b - mean R, mean over the groups with a gradient
    shift_max: float = 0.0  # its largest value ...
    owner_share: float = 0.0  # ... and in that group: the largest share of one episode in sum w^2 n^2,
    owner_reward: float = 0.0  # its reward,
    owner_weight: float = 0.0  # its weight,
    owner_norm: float = 0.0  # its score norm over the median of the others,
    negative: float = 0.0  # and the share of the others whose advantage is negative
    down: float = 0.0  # weighted score norms pushed down ...
    up: float = 0.0  # ... and up, over all groups; 0 where norms are not measured
    num_groups: int = 0  # groups with a gradient
    num_actions: float = 0.0  # mean over episodes
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Group:
    """A group with a gradient: rows and how often each was sampled; the members' numbers, episode by episode."""

    index: int
    rows_N: Ints
    members_G: Ints  # which of rows_N each member is
    reward_G: Tensor
    advantage_G: Tensor


class Stack:
    """Runs of one lag and one number of steps, in step."""

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = specs
        self.weight_SP = stacked([warm_start(spec.seed) for spec in specs])
        self._optimizer = AdamW(self.weight_SP)
        self._generators = [torch.Generator().manual_seed(1000 + spec.seed) for spec in specs]
        self._payment_generators = [torch.Generator().manual_seed(5000 + spec.seed) for spec in specs]
        self._kept: deque[Tensor] = deque(maxlen=specs[0].lag + 1)
        self.steps: list[list[Step]] = [[] for _ in specs]

    def run(self) -> None:
        """All steps."""
        for index in range(self.specs[0].num_steps):
            self._kept.append(self.weight_SP.clone())
            for spec, generator in zip(self.specs, self._generators, strict=True):
                if spec.then == spec.rule and spec.switch_at == index:
                    generator.manual_seed(3000 + spec.seed)
            self.update(sampled(self._kept[0], self._generators))

    @property
    def oldest_SP(self) -> Tensor:
        """The weights that sampled the last step's episodes."""
        return self._kept[0]

    def reward_by_version(self, every: int = 5) -> list[list[float]]:
        """Training reward of the weights after 0, 1, 2... updates.

        No step was played with the last `lag` weights: every `every`-th of them samples fresh episodes.
        """
        lag, num_steps = self.specs[0].lag, self.specs[0].num_steps
        rewards = [[step.reward for step in steps[min(lag, num_steps - 1) :]] for steps in self.steps]
        later = list(self._kept)[1:]
        for i in range(every - 1, len(later), every):
            found_S = sampled(later[i], self._generators).reward_SB.mean(1)
            for run, found in zip(rewards, found_S, strict=True):
                run += [float(found)] * every
        return rewards

    def accuracy(self, num_batches: int = 4) -> list[float]:
        """Of the weights as they are, on fresh tasks: NUM_EPISODES a batch."""
        generators = [torch.Generator().manual_seed(77_000 + spec.seed) for spec in self.specs]
        found = [sampled(self.weight_SP, generators, 1).reward_SB.mean(1) for _ in range(num_batches)]
        return [float(value) for value in np.mean(found, axis=0)]

    def update(self, episodes: Episodes) -> None:
        """One optimizer step of every run."""
        index = len(self.steps[0])
        rules = [spec.rule_at(index) for spec in self.specs]
        paid_SB = [
            paid(spec.payment, episodes.reward_SB[s], episodes.error_SB[s], self._payment_generators[s])
            for s, spec in enumerate(self.specs)
        ]
        runs = [_Run(rule, episodes, s, paid_SB[s]) for s, rule in enumerate(rules)]
        log_ratios, scored = self._scored(episodes, runs)
        gradient_SP = torch.zeros_like(self.weight_SP)
        if scored is not None:
            self._differentiate(scored, runs, log_ratios, gradient_SP)
        norm_S = gradient_SP.norm(dim=1)
        for s, run in enumerate(runs):
            run.measure(log_ratios[s])
            run.step.grad_norm = float(norm_S[s])
            run.step.refused = int(run.step.refused or not math.isfinite(run.step.grad_norm))
            self.steps[s].append(run.step)
        is_taken_S = torch.tensor([not run.step.refused for run in runs])
        scale_S = [
            vcpo.step_scale(run.step.rho, 1.0, rule.algorithm.step_scale) for run, rule in zip(runs, rules, strict=True)
        ]
        lr_S = torch.tensor([spec.lr * scale for spec, scale in zip(self.specs, scale_S, strict=True)])
        clipped_SP = gradient_SP * (CLIP / (norm_S + 1e-6)).clamp(max=1)[:, None]
        self._optimizer.step(self.weight_SP, -clipped_SP.nan_to_num(0, 0, 0), lr_S, is_taken_S)

    def _scored(self, episodes: Episodes, runs: Sequence[_Run]) -> tuple[list[list[Tensor]], Scored | None]:
        """log pi - log mu of the actions of every row of every run; and rows [A, N] of the groups with a gradient."""
        ids = torch.from_numpy(episodes.ids_SUT)
        logprob_SUT = np.zeros(episodes.logprob_SUT[:, :, 1:].shape, np.float32)
        with_gradient = _table([[row for group in run.laid_out(runs) for row in group] for run in runs])
        is_in_SU = np.zeros(episodes.group_SU.shape, np.bool_)
        every = np.arange(len(runs))[:, None]
        scored = None
        if with_gradient.size:
            is_in_SU[every, with_gradient] = True
            scored = Scored(self.weight_SP, ids[every, with_gradient], grads=True)
            logprob_SUT[every, with_gradient] = scored.logprob_SNT.detach().numpy()
        others = _table(
            [
                np.nonzero(~is_in & (group >= 0))[0].tolist()
                for is_in, group in zip(is_in_SU, episodes.group_SU, strict=True)
            ]
        )
        if others.size:
            logprob_SUT[every, others] = Scored(self.weight_SP, ids[every, others], grads=False).logprob_SNT.numpy()
        ratio_SUT = torch.from_numpy(logprob_SUT.astype(np.float64) - episodes.logprob_SUT[:, :, 1:])
        acted_SUT = torch.from_numpy(episodes.acted_SUT[:, :, 1:])
        return [
            [row[mask] for row, mask in zip(*pair, strict=True)] for pair in zip(ratio_SUT, acted_SUT, strict=True)
        ], scored

    def _differentiate(
        self, scored: Scored, runs: Sequence[_Run], log_ratios: list[list[Tensor]], out_SP: Tensor
    ) -> None:
        num_groups, width = _layout(runs)
        shape = (len(runs), num_groups, width)
        weight = np.zeros((*shape, scored.logprob_SNT.shape[2]), np.float32)
        for s, run in enumerate(runs):
            run.weigh(log_ratios[s])
            run.fill_token_weights(weight[s])
        rows = scored.backward(torch.from_numpy(weight).flatten(1, 2))
        norms = self._norms(rows, runs, shape)
        coefficient = torch.zeros(shape)
        for s, run in enumerate(runs):
            run.fill_coefficients(coefficient[s], None if norms is None else norms[int(run.rule.has_proxy_norms)][s])
        by_group_SAP = rows.of_groups(coefficient)
        out_SP += by_group_SAP.sum(1) / NUM_TASKS
        spread_S = by_group_SAP.square().sum((1, 2)) - NUM_TASKS * out_SP.square().sum(1)
        for run, spread in zip(runs, spread_S.tolist(), strict=True):
            run.step.variance = max(spread, 0.0) / (NUM_TASKS * (NUM_TASKS - 1))

    @staticmethod
    def _norms(rows: RowGradients, runs: Sequence[_Run], shape: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
        if not any(run.rule.optimum for run in runs):
            return None
        whole, scales = rows.norms()
        return whole.view(shape), scales.view(shape)


class _Run:
    """One run's part in a step."""

    def __init__(self, rule: Rule, episodes: Episodes, s: int, paid_B: Tensor) -> None:
        self.rule, self.objective, self.step = rule, make_objective(rule.algorithm), Step()
        self._paid_B = paid_B
        self._acted_UT, self._row_B = episodes.acted_SUT[s, :, 1:], episodes.row_SB[s]
        self._num_actions_U = self._acted_UT.sum(1)
        self._weights: dict[int, MemberWeights] = {}
        self.groups = [group for k in range(NUM_TASKS) if (group := self._group(k)) is not None]
        self.step.reward = float(episodes.reward_SB[s].mean())
        self.step.num_actions = float(self._num_actions_U[self._row_B].mean())
        self.step.num_groups = len(self.groups)

    def _group(self, k: int) -> _Group | None:
        members = slice(k * GROUP_SIZE, (k + 1) * GROUP_SIZE)
        row_G, reward_G = self._row_B[members], self._paid_B[members]
        if self.rule.drops_equal and not has_spread(reward_G.tolist()):
            return None
        num_actions_G = torch.from_numpy(self._num_actions_U[row_G])
        advantage_G = self.objective.advantages(Group(reward_E=reward_G, num_actions_E=num_actions_G))
        if advantage_G is None or not bool(advantage_G.any()):
            return None
        rows_N, members_G = np.unique(row_G, return_inverse=True)
        return _Group(k, rows_N, members_G, reward_G, advantage_G)

    def laid_out(self, runs: Sequence[_Run]) -> list[list[int]]:
        """Rows of each group, filled up with the run's first row to the layout of all runs."""
        num_groups, width = _layout(runs)
        groups = [[*group.rows_N.tolist(), *[0] * (width - len(group.rows_N))] for group in self.groups]
        return groups + [[0] * width] * (num_groups - len(groups))

    def weigh(self, log_ratios: Sequence[Tensor]) -> None:
        """Ask the objective for the weights of every row of a group with a gradient."""
        if not self.objective.needs_batch:
            for group in self.groups:
                for row, advantage in self._advantages(group):
                    one = Member(log_ratio_N=log_ratios[row], advantage=advantage, reward=0.0, group=group.index)
                    self._weights[row] = self.objective.weights(one)
            return
        advantages = {row: advantage for group in self.groups for row, advantage in self._advantages(group)}
        members = [
            Member(log_ratio_N=log_ratios[row], advantage=advantages.get(row, 0.0), reward=0.0, group=i // GROUP_SIZE)
            for i, row in enumerate(self._row_B.tolist())
        ]
        self._weights = dict(zip(self._row_B.tolist(), self.objective.batch_weights(members), strict=True))

    def fill_token_weights(self, out_ANT: np.ndarray) -> None:
        """What each action token's score is multiplied by; rules that need norms want them of plain scores."""
        for group, out_NT in zip(self.groups, out_ANT, strict=False):
            length_G = self.objective.lengths(torch.from_numpy(self._num_actions_U[self._rows(group)]))
            for i, row in enumerate(group.rows_N.tolist()):
                mask_T = self._acted_UT[row]
                weight_N = 1.0 if self.rule.optimum else self._weights[row].weight_N.numpy()
                out_NT[i, mask_T] = weight_N / float(length_G[int(np.nonzero(group.members_G == i)[0][0])])

    def fill_coefficients(self, out_AN: Tensor, norm_AN: Tensor | None) -> None:
        """Advantage (and weight, where it is one for the episode and not yet in the scores) over the group's size."""
        for a, group in enumerate(self.groups):
            coefficient_G = group.advantage_G
            if self.rule.optimum is not None:
                assert norm_AN is not None
                coefficient_G = self._about_optimum(group, norm_AN[a][torch.from_numpy(group.members_G)])
            out_AN[a].index_add_(0, torch.from_numpy(group.members_G), (coefficient_G / GROUP_SIZE).float())
        count = max(len(self.groups), 1)
        self.step.shift /= count

    def _about_optimum(self, group: _Group, norm_G: Tensor) -> Tensor:
        rule, step, rows = self.rule, self.step, self._rows(group)
        used_G = torch.tensor([self._weights[row].log_used for row in rows], dtype=torch.float64)
        weight_G = torch.tensor([self._weights[row].log_weight for row in rows], dtype=torch.float64)
        assert rule.optimum is not None
        optimum = rule.optimum(used_G, weight_G, norm_G, group.reward_G)
        assert optimum is not None
        shift = float((optimum - group.reward_G.mean()).mean())
        advantage_G = group.reward_G - optimum
        coefficient_G = advantage_G * used_G.exp()
        step.shift += shift
        step.down -= float((coefficient_G.clamp(max=0) * norm_G).sum())
        step.up += float((coefficient_G.clamp(min=0) * norm_G).sum())
        if shift > step.shift_max or step.owner_share == 0:
            share_G = torch.softmax(2 * (used_G + norm_G.log()), 0)
            owner = int(share_G.argmax())
            others = torch.arange(len(rows)) != owner
            step.shift_max, step.owner_share = shift, float(share_G[owner])
            step.owner_reward, step.owner_weight = (
                float(group.reward_G[owner]),
                float(weight_G[owner].clamp(max=50).exp()),
            )
            step.owner_norm = float(norm_G[owner] / norm_G[others].median())
            step.negative = float((advantage_G[others] < 0).double().mean())
        return coefficient_G

    def measure(self, log_ratios: Sequence[Tensor]) -> None:
        """rho and weights over all episodes; a step that has none is refused."""
        log_weight_U = torch.tensor([float(ratio_N.sum()) for ratio_N in log_ratios], dtype=torch.float64)
        log_weight_B = log_weight_U[torch.from_numpy(self._row_B)]
        try:
            self.step.rho = float(vcpo.ess_ratio(log_weight_B))
        except ValueError:
            self.step.refused = 1
            return
        weight_B = log_weight_B.clamp(max=50).exp()
        self.step.mean_weight, self.step.max_weight = float(weight_B.mean()), float(weight_B.max())

    def _rows(self, group: _Group) -> list[int]:
        rows: list[int] = group.rows_N[group.members_G].tolist()
        return rows

    def _advantages(self, group: _Group) -> dict[int, float].items:  # type: ignore[valid-type]
        return dict(zip(self._rows(group), group.advantage_G.tolist(), strict=True)).items()


def sampled(weight_SP: Tensor, generators: Sequence[torch.Generator], group_size: int = GROUP_SIZE) -> Episodes:
    """NUM_EPISODES fresh episodes of every run, in groups."""
    operands = [calculator.tasks(NUM_EPISODES // group_size, generator) for generator in generators]
    uniform_SBT = torch.stack([torch.rand(NUM_EPISODES, MAX_TOKENS, generator=g) for g in generators])
    return rollout(weight_SP, operands, uniform_SBT, group_size)


def record(stack: Stack) -> list[dict[str, object]]:
    """Everything about every run, as plain numbers."""
    curves, accuracies = stack.reward_by_version(), stack.accuracy()
    return [
        {
            **asdict(spec),
            "accuracy": accuracy,
            "curve": [round(value, 4) for value in curve],
            "steps": {
                name: [float(f"{getattr(step, name):.4g}") for step in steps] for name in Step.__dataclass_fields__
            },
        }
        for spec, accuracy, curve, steps in zip(stack.specs, accuracies, curves, stack.steps, strict=True)
    ]


def _layout(runs: Sequence[_Run]) -> tuple[int, int]:
    """Groups a run and rows a group that hold every run's."""
    return (
        max(len(run.groups) for run in runs),
        max((len(group.rows_N) for run in runs for group in run.groups), default=0),
    )


def _table(lists: Sequence[Sequence[int]]) -> Ints:
    """Rows of equal length, filled up with 0."""
    longest = max(map(len, lists))
    return np.array([[*one, *[0] * (longest - len(one))] for one in lists], dtype=np.int64).reshape(len(lists), longest)
