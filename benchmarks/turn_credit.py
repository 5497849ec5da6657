"""Bias and variance of credit by turn and by episode, exact: every group of a small task is written out.

    python -m benchmarks.turn_credit        # writes benchmarks/turn_credit.md

The task: at each of three turns the policy works, waits or stops. Work earns 0.25 with the turn; an episode that stops
by itself earns 0.5 from `score` for each turn of work. So how long an episode is depends on the policy, and what it
earns on how long it is. Groups of four are drawn from mu and teach pi. The expectation of each estimator over all
50,625 groups is compared with the gradient of the expected reward.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.types import Completion, FinishReason, StopReason, Trajectory, Turn, VersionSpan
from benchmarks import reporting
from trainer.objective import Objective
from trainer.objective.interface import Group, Member, Turns
from trainer.objective.registry import make_objective
from trainer.objective.turn_credit import TurnCredit, turns_of

REPORT = Path(__file__).with_suffix(".md")
WORK, WAIT, STOP = range(3)
NUM_TURNS = 3
NUM_STATES = NUM_TURNS * NUM_TURNS  # turn, and how often it has worked
PREDICTIONS = """Predicted before the first run. Bias is 0 to rounding, on-policy and with ratios, for every estimator
but the two whose baseline contains the episode's own turns. Ratios up to the turn in place of those of the whole
episode, and no reward of the past, make the variance of credit by turn smaller than that of credit by episode:
on-policy by a third, off-policy by half.

What a first run changed: its baseline was the mean of the others *that reached the turn*, which few did. It had more
variance than the mean of all others in every task tried, and more than credit by episode where `step` rewards nothing.
The task of that run gave nothing to episodes that stop early; this one does.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way an episode can go."""

    actions: tuple[int, ...]
    states: tuple[int, ...]
    turn_rewards: tuple[float, ...]
    score: float

    @property
    def reward(self) -> float:
        """Of the whole episode."""
        return self.score + sum(self.turn_rewards)


@cache
def paths() -> tuple[Outcome, ...]:
    """All of them."""
    return tuple(_paths((), ()))


def _paths(actions: tuple[int, ...], states: tuple[int, ...]) -> Iterator[Outcome]:
    is_stopped = bool(actions) and actions[-1] == STOP
    worked = actions.count(WORK)
    if is_stopped or len(actions) == NUM_TURNS:
        rewards = tuple(0.25 * (action == WORK) for action in actions)
        yield Outcome(actions, states, rewards, 0.5 * worked * is_stopped)
        return
    for action in (WORK, WAIT, STOP):
        yield from _paths((*actions, action), (*states, len(actions) * NUM_TURNS + worked))


def policy(seed: int) -> Tensor:
    """Logits of a policy. [NUM_STATES, 3]"""
    return torch.randn(NUM_STATES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def logprobs(logits: Tensor, path: Outcome) -> Tensor:
    """log pi of each turn's action. [K]"""
    return logits.log_softmax(-1)[list(path.states), list(path.actions)]


def true_gradient(logits: Tensor) -> Tensor:
    """d E[reward] / d logits. [NUM_STATES, 3]"""
    theta = logits.clone().requires_grad_()
    value = sum(logprobs(theta, path).sum().exp() * path.reward for path in paths())
    assert isinstance(value, Tensor)
    (gradient,) = torch.autograd.grad(value, theta)
    return gradient


def scores(logits: Tensor, path: Outcome) -> Tensor:
    """grad log pi of each turn's action. [K, NUM_STATES, 3]"""
    one = torch.zeros(len(path.actions), NUM_STATES, 3, dtype=torch.float64)
    for turn, (state, action) in enumerate(zip(path.states, path.actions, strict=True)):
        one[turn, state] = -logits[state].softmax(-1)
        one[turn, state, action] += 1
    return one


def episode(path: Outcome, mu: Tensor, name: str = "e") -> Trajectory:
    """A path as the learner gets it: one token a turn, sampled by mu."""
    turns = []
    for action, logprob, reward in zip(path.actions, logprobs(mu, path).tolist(), path.turn_rewards, strict=True):
        completion = Completion(
            token_ids=(action,),
            behavior_logprobs=(logprob,),
            version_spans=(VersionSpan(version=0, start=0, end=1),),
            finish_reason=FinishReason.STOP,
        )
        turns.append(Turn(observation_ids=(9,), completion=completion, reward=reward))
    return Trajectory(
        id=name,
        task_id="t",
        turns=tuple(turns),
        messages=(),
        reward=path.reward,
        rewards={},
        stop_reason=StopReason.COMPLETED,
    )


@dataclass(frozen=True, slots=True)
class Played:
    """An episode, and what pi makes of it."""

    path: Outcome
    chance: float  # under mu
    segments: tuple[Trajectory, ...]
    turns: Turns
    log_ratio_K: Tensor
    scores: Tensor  # [K, NUM_STATES, 3]


def played(pi: Tensor, mu: Tensor) -> list[Played]:
    """All of them."""
    found = []
    for path in paths():
        one = episode(path, mu)
        (turns,) = turns_of([one])
        log_ratio_K = logprobs(pi, path) - logprobs(mu, path)
        chance = math.exp(float(logprobs(mu, path).sum()))
        found.append(Played(path, chance, (one,), turns, log_ratio_K, scores(pi, path)))
    return found


def estimate(objective: Objective, members: Sequence[Played]) -> Tensor:
    """The gradient that one group gives. [NUM_STATES, 3]"""
    group = Group(
        reward_E=torch.tensor([one.path.reward for one in members], dtype=torch.float64),
        num_actions_E=torch.tensor([len(one.path.actions) for one in members]),
        episodes=tuple(one.segments for one in members),
    )
    total = torch.zeros(NUM_STATES, 3, dtype=torch.float64)
    if (advantages := objective.advantages(group)) is None:
        return total
    for one, advantage in zip(members, advantages, strict=True):
        member = Member(
            log_ratio_N=one.log_ratio_K,
            advantage=float(advantage.mean()),
            advantage_N=advantage if advantage.ndim else None,
            reward=one.path.reward,
            group=0,
            turns=one.turns,
        )
        found = objective.weights(member)
        seed_K = found.weight_N * member.token_advantage_N
        if found.logprob_seed_N is not None:
            seed_K = seed_K + found.logprob_seed_N
        total += torch.einsum("k,ksa->sa", seed_K, one.scores)
    return total / len(members)


def moments(objective: Objective, pi: Tensor, mu: Tensor, *, group_size: int) -> tuple[Tensor, float]:
    """The estimator's expectation over all groups, and the sum of the variances of its components."""
    mean, square = torch.zeros(NUM_STATES, 3, dtype=torch.float64), 0.0
    for members in itertools.combinations_with_replacement(played(pi, mu), group_size):  # their order changes nothing
        orders = math.factorial(group_size) / math.prod(map(math.factorial, Counter(map(id, members)).values()))
        share = orders * math.prod(one.chance for one in members)
        found = estimate(objective, members)
        mean += share * found
        square += share * float(found.square().sum())
    return mean, square - float(mean.square().sum())


class AliveMean(TurnCredit):
    """The natural baseline: the mean of all episodes that reached the turn, this one included."""

    def baselines(self, to_go: Sequence[Tensor]) -> list[Tensor]:
        """The same at each turn for every episode that reached it."""
        longest = max(map(len, to_go))
        means = [torch.stack([one[turn] for one in to_go if len(one) > turn]).mean() for turn in range(longest)]
        return [torch.stack(means[: len(one)]) for one in to_go]


class ReachedOthers(TurnCredit):
    """The mean of the others that reached the turn; where none did, of those that got furthest."""

    def baselines(self, to_go: Sequence[Tensor]) -> list[Tensor]:
        """One for each turn of each episode."""
        return [self._of([*to_go[:at], *to_go[at + 1 :]], len(one)) for at, one in enumerate(to_go)]

    @staticmethod
    def _of(others: Sequence[Tensor], num_turns: int) -> Tensor:
        last = max(map(len, others)) - 1
        turns = (min(turn, last) for turn in range(num_turns))
        return torch.stack([torch.stack([one[turn] for one in others if len(one) > turn]).mean() for turn in turns])


class PaddedOthers(TurnCredit):
    """The mean of all other episodes; one that has ended earns 0."""

    def baselines(self, to_go: Sequence[Tensor]) -> list[Tensor]:
        """One for each turn of each episode."""
        longest = max(map(len, to_go))
        padded = torch.stack([torch.cat([one, one.new_zeros(longest - len(one))]) for one in to_go])
        others = (padded.sum(0) - padded) / (len(to_go) - 1)
        return [others[at, : len(one)] for at, one in enumerate(to_go)]


def estimators(ratio: str) -> dict[str, Objective]:
    """By name, with the ratio."""
    settings = {"preset": "rloo", "ratio": ratio}
    turn = AlgorithmConfig(**settings, credit="turn")  # type: ignore[arg-type]
    return {
        "episode, mean of the others": make_objective(AlgorithmConfig(**settings)),  # type: ignore[arg-type]
        "turn, no baseline": make_objective(AlgorithmConfig(**settings, credit="turn", baseline="none")),  # type: ignore[arg-type]
        "**turn, mean of the others, the last turn after their end** (`credit: turn`)": TurnCredit(turn),
        "turn, mean of the others, 0 after their end": PaddedOthers(turn),
        "turn, mean of the others that reached the turn": ReachedOthers(turn),
        "episode, mean of the group": make_objective(AlgorithmConfig(**settings, baseline="mean")),  # type: ignore[arg-type]
        "turn, mean of all that reached the turn, itself included": AliveMean(turn),
    }


def table(pi: Tensor, mu: Tensor, *, ratio: str, group_size: int) -> str:
    """A row an estimator."""
    true, rows = true_gradient(pi), []
    first = None
    for name, objective in estimators(ratio).items():
        mean, variance = moments(objective, pi, mu, group_size=group_size)
        first = first or variance
        bias = float((mean - true).norm() / true.norm())
        turned = float((mean * true).sum() / mean.norm() / true.norm())
        rows.append([name, f"{bias:.1e}", f"{turned:.4f}", f"{variance:.4f}", f"{variance / first:.2f}"])
        print(rows[-1], flush=True)
    names = ["credit, baseline", "bias / norm", "cosine", "variance", "to the first"]
    return reporting.table(names, rows)


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--out", type=Path, default=REPORT)
    arguments = parser.parse_args()
    pi, mu = policy(0), policy(0) + 0.5 * policy(1)
    gap = -sum(one.chance * float(one.log_ratio_K.sum()) for one in played(pi, mu))
    head = reporting.header("Bias and variance of credit by turn", {"group size": arguments.group_size})
    parts = [head, PREDICTIONS]
    parts += ["## On-policy", table(pi, pi, ratio="none", group_size=arguments.group_size)]
    parts += [
        f"## Off-policy, with ratios: KL(mu, pi) is {gap:.2f} an episode",
        table(pi, mu, ratio="sequence", group_size=arguments.group_size),
        "## Off-policy, without ratios",
        table(pi, mu, ratio="none", group_size=arguments.group_size),
    ]
    arguments.out.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
