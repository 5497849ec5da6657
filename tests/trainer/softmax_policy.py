"""A policy small enough to write out every paper's objective: one softmax per state, float64, autograd.

Also computes the gradient of the objective under test for the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from trainer.objective import Group, Member, Objective, calls, make_objective
from trainer.objective.baselines import logit_norm2

NUM_STATES, NUM_ACTIONS = 5, 4


@dataclass(frozen=True, kw_only=True)
class Episode:
    states: Tensor  # [N]
    actions: Tensor  # [N]
    behavior: Tensor  # [N] log mu
    reference: Tensor  # [N] log-probability under a frozen model
    reward: float


Groups = list[list[Episode]]


def policy() -> Tensor:
    """Logits [states, actions]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(NUM_STATES, NUM_ACTIONS, generator=generator, dtype=torch.float64).requires_grad_()


def logprobs(theta: Tensor, episode: Episode) -> Tensor:
    return theta.log_softmax(-1)[episode.states, episode.actions]


def groups(theta: Tensor, *, off_policy: float = 0.4, seed: int = 0) -> Groups:
    """Three groups of four episodes of 1 to 6 actions; one group has equal rewards, one a single success."""
    generator = torch.Generator().manual_seed(seed)
    rewards = [(1.0, 0.0, 0.25, 1.0), (0.0, 0.0, 1.0, 0.0), (1.0, 1.0, 1.0, 1.0)]
    return [[_episode(theta, reward, off_policy, generator) for reward in members] for members in rewards]


def _episode(theta: Tensor, reward: float, off_policy: float, generator: torch.Generator) -> Episode:
    length = int(torch.randint(1, 7, (), generator=generator))
    states = torch.randint(0, NUM_STATES, (length,), generator=generator)
    actions = torch.randint(0, NUM_ACTIONS, (length,), generator=generator)
    scored = theta.detach().log_softmax(-1)[states, actions]
    noise = off_policy * torch.randn(length, generator=generator, dtype=torch.float64)
    frozen = scored + 0.5 * torch.sin(scored * length)
    return Episode(states=states, actions=actions, behavior=scored + noise, reference=frozen, reward=reward)


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def score(theta: Tensor, logprob: Tensor) -> Tensor:
    return torch.autograd.grad(logprob, theta, retain_graph=True)[0]


def objective_gradient(theta: Tensor, batch: Groups, algorithm: AlgorithmConfig) -> Tensor:
    """g = 1/B sum_i A_i / L_i sum_t w_it grad log pi_t, the baseline moved to b* where norms decide it."""
    objective, total, size = make_objective(algorithm), torch.zeros_like(theta), sum(map(len, batch))
    weights = _all_weights(theta, batch, objective)
    for number, group in enumerate(batch):
        reward, length, advantage = _of_group(group, objective)
        if advantage is None:
            continue
        scores, used, norms = torch.zeros_like(theta), [], []
        for i, episode in enumerate(group):
            member = weights[number, i]
            plain = score(theta, logprobs(theta, episode).sum() / length[i])
            weighted = score(theta, (member.weight_N * logprobs(theta, episode)).sum() / length[i])
            total += weighted * advantage[i] / size
            if member.logprob_seed_N is not None:
                total += score(theta, (member.logprob_seed_N * logprobs(theta, episode)).sum() / length[i]) / size
            scores += weighted * objective.score_scale(reward) / size
            used.append(objective.log_in_baseline(member))
            norms.append(objective.norm_in_baseline(float(plain.norm()), float(length[i])))
        if objective.needs_norms:
            optimum = objective.baseline(float64(used), float64(norms), reward)
            total -= (optimum - reward.mean()) * scores if optimum is not None else 0.0
    return total.detach()


def _of_group(group: list[Episode], objective: Objective) -> tuple[Tensor, Tensor, Tensor | None]:
    reward = float64([episode.reward for episode in group])
    num_actions = torch.tensor([len(episode.actions) for episode in group])
    return (
        reward,
        objective.lengths(num_actions),
        objective.advantages(Group(reward_E=reward, num_actions_E=num_actions)),
    )


def _all_weights(theta: Tensor, batch: Groups, objective: Objective) -> dict[tuple[int, int], object]:
    members, keys = [], []
    for number, group in enumerate(batch):
        advantage = _of_group(group, objective)[2]
        for i, episode in enumerate(group):
            logprob = logprobs(theta, episode).detach()
            pi = theta.detach().softmax(-1)[episode.states]
            members.append(
                Member(
                    log_ratio_N=logprob - episode.behavior,
                    advantage=0.0 if advantage is None else float(advantage[i]),
                    reward=episode.reward,
                    group=number,
                    episode=i,
                    logprob_N=logprob,
                    entropy_N=-(pi * pi.log()).sum(-1),
                    logit_norm2_N=logit_norm2(logprob, pi.square().sum(-1)),
                    reference_logprob_N=episode.reference,
                )
            )
            keys.append((number, i))
    return dict(zip(keys, calls.weigh(objective, members), strict=True))
