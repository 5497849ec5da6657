"""Measures on the calculator toy what a baseline computed from its own group does to the gradient under lag.

A baseline that did not depend on the group would leave the expected gradient alone. Here each rule's own expectation is
set against that of no baseline, with inner products of disjoint halves of the sample, so that noise adds no length:

    kept      <E g_rule, E g_none> / |E g_none|^2
    cosine    between the two expectations
    variance  of the gradient of one group, divided by that without a baseline
    noise     variance / kept^2, likewise: what is left of the gain when the lost length is made up for
    down      weighted score norms pushed down for each one pushed up

    python -m benchmarks.baseline_bias --lags 8 32 --seeds 0 1
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from benchmarks.calculator import Policy
from benchmarks.reporting import header, table
from benchmarks.stability_policy import SHAPES, named
from benchmarks.stability_rollout import Episodes
from benchmarks.stability_rules import without_weights
from benchmarks.stability_train import GROUP_SIZE, NUM_TASKS, Spec, Stack, sampled
from trainer.objective import vcpo

MAX_WEIGHT = 8.0
RULES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor | None]] = {
    "none": lambda log_weight_G, norm_G, reward_G: torch.zeros(()),
    "mean": lambda log_weight_G, norm_G, reward_G: reward_G.mean(),
    "opob": vcpo.optimal_baseline,
    "opob_safe": vcpo.safe_baseline,
    "opob without w^2": lambda log_weight_G, norm_G, reward_G: without_weights(
        log_weight_G, log_weight_G, norm_G, reward_G
    ),
}
COLUMNS = ("lag, seed", "rule", "kept", "cosine", "variance", "noise", "down", "b* above mean", "highest above")


class Sample:
    """Group gradients of every rule from one learner state. Groups of equal rewards count as 0 under a baseline."""

    def __init__(self) -> None:
        self.gradients: dict[str, list[Tensor]] = {rule: [] for rule in RULES}
        self.pushed: dict[str, list[float]] = {rule: [0.0, 0.0] for rule in RULES}  # down, up
        self.shifts: list[float] = []  # b* - mean R

    def add(self, log_weight_G: Tensor, score_GP: Tensor, reward_G: Tensor) -> None:
        """One group under every rule."""
        norm_G = score_GP.norm(dim=1).double()
        has_spread = bool((reward_G != reward_G[0]).any())
        for name, rule in RULES.items():
            baseline = rule(log_weight_G, norm_G, reward_G) if has_spread or name == "none" else reward_G[0]
            assert baseline is not None
            coefficient_G = log_weight_G.exp() * (reward_G - baseline)
            self.gradients[name].append(coefficient_G.float() @ score_GP / len(reward_G))
            if has_spread:
                self.pushed[name][0] -= float((coefficient_G.clamp(max=0) * norm_G).sum())
                self.pushed[name][1] += float((coefficient_G.clamp(min=0) * norm_G).sum())
        if has_spread:
            optimum = vcpo.optimal_baseline(log_weight_G, norm_G, reward_G)
            assert optimum is not None
            self.shifts.append(float(optimum - reward_G.mean()))

    def rows(self, label: str) -> list[list[str]]:
        """The table, one line per rule."""
        none_NP = torch.stack(self.gradients["none"])
        none_even, none_odd = none_NP[::2].mean(0), none_NP[1::2].mean(0)
        none_square, none_variance = float(none_even @ none_odd), _variance(none_NP)
        above = sum(shift > 0 for shift in self.shifts) / len(self.shifts)
        rows = []
        for name, gradients in self.gradients.items():
            gradient_NP = torch.stack(gradients)
            even, odd = gradient_NP[::2].mean(0), gradient_NP[1::2].mean(0)
            kept = float(even @ none_odd + odd @ none_even) / 2 / none_square
            cosine = kept * math.sqrt(none_square / max(float(even @ odd), 1e-30))
            variance = _variance(gradient_NP) / none_variance
            down = self.pushed[name][0] / self.pushed[name][1]
            numbers = (kept, min(cosine, 1.0), variance, variance / kept**2, down)
            tail = [f"{above:.0%}", f"{max(self.shifts):.2f}"] if name == "opob" else ["", ""]
            rows.append([label, name, *(f"{number:.2f}" for number in numbers), *tail])
        return rows


def _variance(gradient_NP: Tensor) -> float:
    return float((gradient_NP - gradient_NP.mean(0)).square().sum() / (len(gradient_NP) - 1))


def measure(*, seed: int, lag: int, lr: float, num_steps: int, num_groups: int) -> Sample:
    """Train for `num_steps` under `lag` with opob_safe, then sample groups from the weights of `lag` steps ago."""
    stack = Stack([Spec(rule="opob_safe", lag=lag, seed=seed, lr=lr, num_steps=num_steps)])
    stack.run()
    sample, generator = Sample(), torch.Generator().manual_seed(2000 + seed)
    for _ in range(num_groups // NUM_TASKS):
        episodes = sampled(stack.oldest_SP, [generator])
        log_weight_U, score_UP = scores(stack.weight_SP, episodes)
        reward_U = torch.from_numpy(episodes.reward_SU[0]).double()
        for row_G in torch.from_numpy(episodes.row_SB[0]).view(NUM_TASKS, GROUP_SIZE):
            sample.add(log_weight_U[row_G].clamp(max=math.log(MAX_WEIGHT)), score_UP[row_G], reward_U[row_G])
    return sample


def scores(weight_SP: Tensor, episodes: Episodes) -> tuple[Tensor, Tensor]:
    """(log w [U], gradient of the mean log-probability of the actions [U, P]) of the first run's distinct episodes."""
    policy, parameters = Policy(), {name: value[0] for name, value in named(weight_SP).items()}
    ids_UT, acted_UT = torch.from_numpy(episodes.ids_SUT[0]), torch.from_numpy(episodes.acted_SUT[0, :, 1:])

    def of_one(parameters: dict[str, Tensor], ids_T: Tensor, acted_T: Tensor) -> tuple[Tensor, Tensor]:
        logits_TV = functional_call(policy, parameters, (ids_T[None],))[0, :-1]
        logprob_T = logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0] * acted_T
        return logprob_T.sum() / acted_T.sum().clamp(min=1), logprob_T

    gradients, logprob_UT = vmap(grad(of_one, has_aux=True), in_dims=(None, 0, 0))(parameters, ids_UT, acted_UT)
    log_ratio_UT = logprob_UT.double() - torch.from_numpy(episodes.logprob_SUT[0, :, 1:])
    return log_ratio_UT.sum(1), torch.cat([gradients[name].flatten(1) for name in SHAPES], dim=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=48)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for seed in given.seeds:
        for lag in given.lags:
            sample = measure(seed=seed, lag=lag, lr=given.lr, num_steps=given.steps, num_groups=given.groups)
            rows += sample.rows(f"{lag}, {seed}")
    print(header("What a baseline from its own group does", vars(given)) + "\n" + table(COLUMNS, rows))


if __name__ == "__main__":
    main()
