"""The ways to come to a step's gradient, each as one call: ours, a plain packed step, and the reference's loop.

Plain and reference use nothing of trainer/ but the plan of packs, which the plain one shares with ours, and the packed
attention, so that the comparison is about gradients alone. All gradients point uphill, one tensor a parameter.
Shapes: _N action tokens, _T tokens, _G members of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.testing import group
from agentrl.types import Completion, FinishReason, StopReason, Trajectory, TrajectoryGroup, Turn, VersionSpan
from trainer import packing
from trainer.gpu_report import workload
from trainer.gpu_report.workload import Sample
from trainer.gradient import attention
from trainer.gradient.step_gradient import Estimator
from trainer.step_stats import GroupStats

CLIP = 0.2
MAX_WEIGHT = 8.0
ALGORITHMS = {
    "ours, no norms": AlgorithmConfig(preset="grpo"),
    "vcpo exact": AlgorithmConfig(preset="vcpo"),
    "vcpo proxy": AlgorithmConfig(preset="vcpo", baseline_norms="proxy"),
}
PLAIN, REFERENCE = "plain packed GRPO", "reference way"
Step = Callable[[], list[Tensor]]


def make(name: str, model: Any, samples: Sequence[Sample]) -> Step:
    """The method of that name, ready to be called again and again."""
    if name == PLAIN:
        return Plain(model, samples)
    if name == REFERENCE:
        return Reference(model, samples)
    return Ours(model, samples, ALGORITHMS[name])


class Ours:
    """The learner's estimator, as the learner calls it."""

    def __init__(self, model: Any, samples: Sequence[Sample], algorithm: AlgorithmConfig) -> None:
        attention.install(model)
        self.stats: list[GroupStats] = []
        self._groups = groups(samples)
        self._estimator = Estimator(model, algorithm, pack_tokens=workload.pack_tokens(model.device))
        self._size = len(samples)

    def __call__(self) -> list[Tensor]:
        """Make a step; `stats` then says what it used."""
        self.stats = self._estimator.estimate(self._groups, policy_version=0, num_episodes=self._size)
        return self._estimator.sums.total


class Plain:
    """Packs through the model, GRPO's clipped objective on the logits of the action tokens, and `loss.backward()`."""

    def __init__(self, model: Any, samples: Sequence[Sample]) -> None:
        attention.install(model)
        self._model = model
        self._samples = list(samples)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._advantages = workload.advantages(samples)
        self._tensors = [packing.action_tensors(_trajectory("", sample), model.device) for sample in samples]

    def __call__(self) -> list[Tensor]:
        """Make a step."""
        for index, logprob_N in self._scored():
            advantage, behavior_N = self._advantages[index], self._tensors[index].behavior_logprob_N
            ratio_N = (logprob_N - behavior_N.to(logprob_N)).exp()
            clipped_N = ratio_N.clamp(1 - CLIP, 1 + CLIP)
            yield_N = torch.minimum(ratio_N * advantage, clipped_N * advantage)
            self._collect(yield_N.mean() / len(self._samples))
        return self._taken()

    def weighted(self, coefficients: Sequence[float]) -> list[Tensor]:
        """sum_i c_i / N_i sum_t grad log pi instead: one number a trajectory."""
        for index, logprob_N in self._scored():
            self._collect(logprob_N.mean() * coefficients[index])
        return self._taken()

    def _scored(self) -> Any:
        """(index, log-probabilities) of every trajectory; a pack's gradient is made once all of it was collected."""
        self._loss: Tensor | None = None
        for indices in packing.plan([one.num_read for one in self._tensors], workload.pack_tokens(self._model.device)):
            pack = packing.join([self._tensors[index] for index in indices])
            logits_NV = self._model(
                input_ids=pack.input_ids_S[None],
                position_ids=pack.position_ids_S[None],
                use_cache=False,
                logits_to_keep=pack.predictor_N,
                **attention.segment_arguments(pack.bounds, pack.input_ids_S.device),
            ).logits[0]
            logits_NV = logits_NV.float()
            logprob_N = logits_NV.gather(1, pack.target_N[:, None])[:, 0] - logits_NV.logsumexp(dim=1)
            del logits_NV
            self._loss = None
            yield from zip(indices, pack.per_segment(logprob_N), strict=True)
            assert self._loss is not None
            self._loss.backward()

    def _collect(self, part: Tensor) -> None:
        self._loss = part if self._loss is None else self._loss + part

    def _taken(self) -> list[Tensor]:
        return _take(self._parameters)


class Reference:
    """The published code's way: every trajectory alone, padded to the longest; its gradient's norm; two buffers.

    logits of all positions, as there. With the baseline as in the paper (the published code weighs twice).
    """

    def __init__(self, model: Any, samples: Sequence[Sample]) -> None:
        self._model = model
        self._samples = list(samples)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._longest = max(len(sample.ids_T) for sample in samples)
        self.norms: list[float] = []

    def __call__(self) -> list[Tensor]:
        """Make a step."""
        self.norms = []
        total, scores = ([torch.zeros_like(p, dtype=torch.float32) for p in self._parameters] for _ in range(2))
        for _, members in groupby(self._samples, key=lambda one: one.group):
            weight_G, norm2_G, reward_G = torch.tensor([self._member(one, total, scores) for one in members]).unbind(1)
            importance_G = weight_G.square() * norm2_G
            baseline = float((importance_G * reward_G).sum() / importance_G.sum())
            for one, score in zip(total, scores, strict=True):
                one.sub_(score, alpha=baseline)
                score.zero_()
        return total

    def _member(self, sample: Sample, total: Sequence[Tensor], scores: Sequence[Tensor]) -> tuple[float, float, float]:
        """(weight, squared norm, reward); its gradient goes into both buffers."""
        device, num_tokens = self._model.device, len(sample.ids_T)
        ids_T, mask_T = torch.zeros(2, self._longest, dtype=torch.int64, device=device)
        ids_T[:num_tokens], mask_T[:num_tokens] = sample.ids_T, 1
        logits_TV = self._model(input_ids=ids_T[None], attention_mask=mask_T[None], use_cache=False).logits[0].float()
        chosen_T = logits_TV[:-1].gather(1, ids_T[1:, None])[:, 0] - logits_TV[:-1].logsumexp(dim=1)
        logprob_N = chosen_T[: num_tokens - 1][sample.acted_T[1:]]
        logprob_N.mean().backward()
        weight = float((logprob_N.detach().cpu().double() - sample.behavior_T[sample.acted_T]).sum().exp())
        weight = min(weight, MAX_WEIGHT)
        gradients = _take(self._parameters)
        norm2 = float(torch.nn.utils.get_total_norm(gradients)) ** 2
        for one, score, gradient in zip(total, scores, gradients, strict=True):
            share = weight / len(self._samples)
            one.add_(gradient, alpha=share * sample.reward)
            score.add_(gradient, alpha=share)
        self.norms.append(norm2**0.5)
        return weight, norm2, sample.reward


def relative_error(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """|ours - theirs| / |theirs| over all parameters."""
    difference = [float((a.double() - b.double()).norm()) for a, b in zip(ours, theirs, strict=True)]
    return math.hypot(*difference) / math.hypot(*(float(b.double().norm()) for b in theirs))


def _take(parameters: Sequence[Tensor]) -> list[Tensor]:
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


def groups(samples: Sequence[Sample]) -> list[TrajectoryGroup]:
    """The batch as the learner takes it."""
    return [_group(key, list(members)) for key, members in groupby(samples, key=lambda one: one.group)]


def _group(key: int, members: Sequence[Sample]) -> TrajectoryGroup:
    return group(key, [_trajectory(f"{key}-{index}", member) for index, member in enumerate(members)])


def _trajectory(name: str, sample: Sample) -> Trajectory:
    """Turns: an observation and the actions that follow it."""
    turns: list[Turn] = []
    observed: tuple[int, ...] = ()
    ids, logprobs = sample.ids_T.tolist(), sample.behavior_T.tolist()
    for has_acted, positions in groupby(range(len(ids)), key=lambda t: bool(sample.acted_T[t])):
        at = list(positions)
        if not has_acted:
            observed = tuple(ids[t] for t in at)
            continue
        completion = Completion(
            token_ids=tuple(ids[t] for t in at),
            behavior_logprobs=tuple(logprobs[t] for t in at),
            version_spans=(VersionSpan(version=0, start=0, end=len(at)),),
            finish_reason=FinishReason.STOP,
        )
        turns.append(Turn(observation_ids=observed, completion=completion))
    return Trajectory(
        id=name,
        task_id="",
        turns=tuple(turns),
        messages=(),
        reward=sample.reward,
        rewards={},
        stop_reason=StopReason.COMPLETED,
    )
