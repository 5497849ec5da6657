"""A trial of an objective before the first step: two made-up episodes, so that a mistake in it is found at start.

Independent of models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.env import places
from agentrl.errors import ConfigError
from agentrl.types import Completion, FinishReason, StopReason, Trajectory, Turn, VersionSpan
from trainer.objective import calls
from trainer.objective.interface import Group, Member, Objective


def check(objective: Objective) -> None:
    """Ask the objective about two made-up episodes of 3 and 2 action tokens with rewards 1 and 0.

    Raises ConfigError where it fails, or returns something of the wrong shape or not finite.
    """
    try:
        found = calls.advantages(objective, made_up_group())
        members = [_made_up_member(objective, at, one) for at, one in enumerate(found or torch.zeros(2))]
        weights = calls.weigh(objective, members)
    except ConfigError:
        raise
    except Exception as error:
        place = places.in_brackets(places.raised_at(error))
        raise ConfigError(
            f"algorithm.objective: {type(objective).__name__} fails on two episodes of 3 and 2 action tokens: "
            f"{type(error).__name__}: {error}{place}"
        ) from error
    tensors = [*(found or []), *(tensor for one in weights for tensor in calls.tensors_of(one).values())]
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise calls.wrong(objective, "advantages, weights or terms", "NaN or an infinity", "finite numbers")


def made_up_group() -> Group:
    """Two episodes of one turn, with 3 and 2 action tokens and rewards 1 and 0.

    >>> made_up_group().num_actions_E.tolist()
    [3, 2]
    """
    episodes = [(_made_up_episode(f"made-up-{length}", length, float(length == 3)),) for length in (3, 2)]
    return Group(
        reward_E=torch.tensor([one.reward for (one,) in episodes], dtype=torch.float64),
        num_actions_E=torch.tensor([one.num_action_tokens for (one,) in episodes]),
        episodes=tuple(episodes),
    )


def _made_up_episode(name: str, num_actions: int, reward: float) -> Trajectory:
    completion = Completion(
        token_ids=tuple(range(num_actions)),
        behavior_logprobs=(-1.0,) * num_actions,
        version_spans=(VersionSpan(version=0, start=0, end=num_actions),),
        finish_reason=FinishReason.STOP,
    )
    return Trajectory(
        id=name,
        task_id="made-up",
        turns=(Turn(observation_ids=(0,), completion=completion),),
        messages=(),
        reward=reward,
        rewards={"reward": reward},
        stop_reason=StopReason.COMPLETED,
    )


def _made_up_member(objective: Objective, at: int, advantage: Tensor) -> Member:
    logprob_N = torch.full((3 - at,), -1.0, dtype=torch.float64)
    return Member(
        log_ratio_N=logprob_N * 0,
        advantage=float(advantage.mean()),
        reward=1.0 - at,
        group=0,
        advantage_N=advantage if advantage.ndim else None,
        logprob_N=logprob_N,
        entropy_N=-logprob_N,
        logit_norm2_N=-logprob_N / 2,
        reference_logprob_N=logprob_N if objective.needs_reference else None,
    )
