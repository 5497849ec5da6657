"""Bias and variance of baselines from their own group, exactly: every group of random four-armed bandits is enumerated.

    python -m benchmarks.baselines     # about a minute; writes baselines.md beside this file

One policy gradient estimate is g = 1/G sum_i min(w_i, c) (R_i - b_i) score_i over a group of G draws from mu, with
w = pi / mu, score = d log pi / d logits, and b computed from the group. Its mean and covariance over all groups are
sums over multisets of draws: no sampling error. docs/baselines.md derives what they should be.

Shapes: _K outcomes of one draw (an arm and its reward), _D logits, _M multisets of draws, _G draws of a group. float64.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.reporting import ROOT, header, table

Floats = NDArray[np.float64]
Rule = Callable[[Floats, Floats, Floats], Floats]
"""(weights in use, score norms, rewards), all [M, G], to the baseline of every draw, [M, G]."""

GROUP_SIZE, NUM_ARMS = 8, 4
DRIFT = 1.5
"""Standard deviation of the logits of pi minus those of mu, off-policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandit:
    """What one draw can give."""

    chance_K: Floats
    """Under mu."""
    weight_K: Floats
    """pi / mu of the arm."""
    score_KD: Floats
    reward_K: Floats

    def gradient(self) -> Floats:
        """The true one: d/d logits of the expected reward under pi. [D]"""
        return (self.chance_K * self.weight_K * self.reward_K) @ self.score_KD


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Of the estimate from one group."""

    mean_D: Floats
    variance: float
    """Trace of the covariance."""


def zero(w_MG: Floats, n_MG: Floats, reward_MG: Floats) -> Floats:
    """No baseline."""
    return np.zeros_like(reward_MG)


def zero_dropped(w_MG: Floats, n_MG: Floats, reward_MG: Floats) -> Floats:
    """No baseline, and groups of equal rewards are dropped: their reward is their baseline."""
    lowest_M1, highest_M1 = reward_MG.min(1, keepdims=True), reward_MG.max(1, keepdims=True)
    return np.where(highest_M1 - lowest_M1 < 1e-9, reward_MG, 0.0)


def mean(w_MG: Floats, n_MG: Floats, reward_MG: Floats) -> Floats:
    """The group's mean reward."""
    return np.broadcast_to(reward_MG.mean(1, keepdims=True), reward_MG.shape)


def optimal(w_MG: Floats, n_MG: Floats, reward_MG: Floats) -> Floats:
    """b* (arXiv 2602.17616, section 4.2)."""
    q_MG = (w_MG * n_MG) ** 2
    return np.broadcast_to((q_MG * reward_MG).sum(1, keepdims=True) / q_MG.sum(1, keepdims=True), reward_MG.shape)


def safe(w_MG: Floats, n_MG: Floats, reward_MG: Floats) -> Floats:
    """min(b*, mean)."""
    return np.minimum(optimal(w_MG, n_MG, reward_MG), mean(w_MG, n_MG, reward_MG))


def mean_of_others(w_MG: Floats, n_MG: Floats, reward_MG: Floats) -> Floats:
    """The mean reward of the other draws."""
    return (reward_MG.sum(1, keepdims=True) - reward_MG) / (reward_MG.shape[1] - 1)


def optimal_of_others(w_MG: Floats, n_MG: Floats, reward_MG: Floats) -> Floats:
    """b* of the other draws."""
    q_MG = (w_MG * n_MG) ** 2
    others_GG = 1.0 - np.eye(reward_MG.shape[1])  # sums without the own term: a difference would cancel
    return ((q_MG * reward_MG) @ others_GG) / (q_MG @ others_GG)


def safe_of_others(w_MG: Floats, n_MG: Floats, reward_MG: Floats) -> Floats:
    """min(b*, mean) of the other draws."""
    return np.minimum(optimal_of_others(w_MG, n_MG, reward_MG), mean_of_others(w_MG, n_MG, reward_MG))


RULES: Mapping[str, Rule] = {
    "none": zero,
    "none, equal groups dropped": zero_dropped,
    "mean": mean,
    "leave_one_out": mean_of_others,
    "opob": optimal,
    "opob_safe": safe,
    "opob_leave_one_out": optimal_of_others,
    "opob_safe_leave_one_out": safe_of_others,
}


@lru_cache(maxsize=4)
def multisets(num_outcomes: int, group_size: int) -> tuple[NDArray[np.int64], Floats]:
    """Every multiset of draws, [M, G], and the number of orders that it can come in, [M]."""
    draws_MG = np.array(list(itertools.combinations_with_replacement(range(num_outcomes), group_size)))
    counts_MK = (draws_MG[:, :, None] == np.arange(num_outcomes)).sum(1)
    factorial = np.array([math.factorial(n) for n in range(group_size + 1)], dtype=np.float64)
    return draws_MG, factorial[group_size] / factorial[counts_MK].prod(1)


def moments(bandit: Bandit, rule: Rule, *, max_weight: float = math.inf, group_size: int = GROUP_SIZE) -> Moments:
    """Exact mean and variance of the estimate under a rule. `max_weight`: c."""
    draws_MG, orders_M = multisets(len(bandit.chance_K), group_size)
    chance_M = orders_M * bandit.chance_K[draws_MG].prod(1)
    used_K = np.minimum(bandit.weight_K, max_weight)
    norm_K = np.linalg.norm(bandit.score_KD, axis=1)
    w_MG, reward_MG = used_K[draws_MG], bandit.reward_K[draws_MG]
    coefficient_MG = w_MG * (reward_MG - rule(w_MG, norm_K[draws_MG], reward_MG)) / group_size
    estimate_MD = np.einsum("mg,mgd->md", coefficient_MG, bandit.score_KD[draws_MG])
    mean_D = chance_M @ estimate_MD
    return Moments(mean_D=mean_D, variance=float(chance_M @ (estimate_MD**2).sum(1) - mean_D @ mean_D))


def bandit(pi_K: Floats, mu_K: Floats, reward_K: Floats) -> Bandit:
    """Arms with fixed rewards."""
    return Bandit(chance_K=mu_K, weight_K=pi_K / mu_K, score_KD=np.eye(len(pi_K)) - pi_K, reward_K=reward_K)


def noisy(clean: Bandit, noise: float) -> Bandit:
    """The same with rewards 0 and 1 graded the wrong way round with probability `noise`."""
    return Bandit(
        chance_K=np.concatenate([clean.chance_K * (1 - noise), clean.chance_K * noise]),
        weight_K=np.tile(clean.weight_K, 2),
        score_KD=np.tile(clean.score_KD, (2, 1)),
        reward_K=np.concatenate([clean.reward_K, 1 - clean.reward_K]),
    )


def drawn(generator: np.random.Generator, *, drift: float, rewards: str) -> Bandit:
    """A random bandit. `rewards`: binary, signed, floor (1 and 0.9), real (uniform in 0 to 1) or noisy (one in ten)."""
    logits_K = generator.normal(size=NUM_ARMS)
    pi_K, mu_K = _softmax(logits_K + drift * generator.normal(size=NUM_ARMS)), _softmax(logits_K)
    num_right = int(generator.integers(1, NUM_ARMS))
    right_K = (np.argsort(generator.random(NUM_ARMS)) < num_right).astype(np.float64)
    uniform_K = generator.random(NUM_ARMS)
    values = {"signed": 2 * right_K - 1, "floor": 0.9 + 0.1 * right_K, "real": uniform_K}
    found = bandit(pi_K, mu_K, values.get(rewards, right_K))
    return noisy(found, 0.1) if rewards == "noisy" else found


def _softmax(logits_K: Floats) -> Floats:
    power_K = np.exp(logits_K - logits_K.max())
    result: Floats = power_K / power_K.sum()
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One table."""

    title: str
    drift: float
    max_weight: float = math.inf
    rewards: str = "binary"


SETTINGS = (
    Setting(title="On-policy", drift=0.0),
    Setting(title="Off-policy, weights as they are", drift=DRIFT),
    Setting(title="Off-policy, weights cut at 8", drift=DRIFT, max_weight=8.0),
    Setting(title="Off-policy, weights cut at 2", drift=DRIFT, max_weight=2.0),
    *(
        Setting(title=f"Off-policy, weights cut at 2, rewards {what}", drift=DRIFT, max_weight=2.0, rewards=name)
        for name, what in (
            ("signed", "-1 and 1"),
            ("floor", "0.9 and 1"),
            ("real", "uniform in 0 to 1"),
            ("noisy", "0 and 1, one in ten graded wrong"),
        )
    ),
)
COLUMNS = ("baseline", "kept", "kept, worst 5 %", "cosine, worst 5 %", "cosine, least", "bias", "variance", "noise")


def measured(setting: Setting, rule: Rule, num_draws: int) -> list[tuple[float, float, float, float, float]]:
    """For each random bandit: kept, cosine, bias, variance and noise to signal, relative to the true gradient's size.

    Every rule and setting sees the same bandits.
    """
    generator, found = np.random.default_rng(0), []
    for _ in range(num_draws):
        one = drawn(generator, drift=setting.drift, rewards=setting.rewards)
        true_D, got = one.gradient(), moments(one, rule, max_weight=setting.max_weight)
        size = float(np.linalg.norm(true_D))
        kept = float(got.mean_D @ true_D) / size**2
        cosine = kept * size / float(np.linalg.norm(got.mean_D))
        bias = float(np.linalg.norm(got.mean_D - true_D)) / size
        relative = got.variance / size**2
        found.append((kept, cosine, bias, relative, relative / kept**2))
    return found


def one_table(setting: Setting, num_draws: int) -> str:
    """A row a rule."""
    rows = []
    for name, rule in RULES.items():
        kept, cosine, bias, variance, noise = np.array(measured(setting, rule, num_draws)).T
        worst = (np.quantile(kept, 0.05), np.quantile(cosine, 0.05), cosine.min())
        row = (np.median(kept), *worst, np.median(bias), np.median(variance), np.median(noise))
        rows.append([name, *(f"{x:.2f}" for x in row)])
    return f"## {setting.title}\n\n" + table(COLUMNS, rows)


def report(settings: Sequence[Setting], num_draws: int) -> str:
    """The whole page."""
    facts = {"bandits a table": num_draws, "arms": NUM_ARMS, "draws a group": GROUP_SIZE, "drift": DRIFT}
    about = (
        "*Kept* is the projection of the expected estimate on the true gradient, divided by its squared length: 1 for\n"
        "an unbiased estimate. *Cosine* is between the two. *Bias* is the length of their difference, *variance* the\n"
        "trace of one group's covariance, *noise* variance over kept^2; all relative to the true gradient. Medians\n"
        "over bandits, the value that one bandit in twenty is below, and the least.\n"
    )
    title = header("Baselines from their own group, exactly", facts)
    return "\n".join([title, about, *(one_table(setting, num_draws) for setting in settings)])


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200, help="bandits a table")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "baselines.md")
    given = parser.parse_args()
    given.out.write_text(report(SETTINGS, given.draws))
    print(f"written: {given.out}")


if __name__ == "__main__":
    main()
