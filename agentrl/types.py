"""Frozen records that cross a stage: task -> turn -> trajectory -> episode -> group -> batch -> step output.

Shapes: _B trajectories, _T tokens, _G trajectories of a group. All records are plain dataclasses, so msgspec encodes
them for HTTP and disk without a second definition. Independent of HTTP, models and tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call of the model. `arguments` is parsed JSON, not yet validated against the tool's schema.

    ToolCall(id="call_0", name="python", arguments={"code": "print(1)"})
    """

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message. Environments exchange messages; only `agentrl.tokens` converts them to tokens.

    Message(role="tool", content="1", tool_call_id="call_0")
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


def system(content: str) -> Message:
    """A system message."""
    return Message(role="system", content=content)


def user(content: str) -> Message:
    """A user message.

    >>> user("hi").role
    'user'
    """
    return Message(role="user", content=content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row to solve. `answer` stays on the trusted side: it never enters a prompt or the sandbox.

    Task(id="aime-2024-1", prompt="Find ...", answer="204")
    """

    id: str
    prompt: str
    answer: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of one generation. Only with the defaults do logprobs need no correction.

    Raises ValueError, naming the field, for a value that cannot be sampled with.

    >>> Sampling(max_tokens=100, temperature=0.5).is_unmodified
    False
    """

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the generation. The token that completes one is kept and is the last."""
    seed: int | None = None
    """The same request with the same seed has the same answer, if the engine guarantees that: docs/resume.md."""

    def __post_init__(self) -> None:
        for name, is_valid, wanted in (
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("temperature", 0 <= self.temperature < math.inf, ">= 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 or >= 1"),
            ("stop", all(self.stop), "non-empty texts"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "in [0, 2^63)"),
        ):
            if not is_valid:
                raise ValueError(f"sampling: {name} must be {wanted}, got {getattr(self, name)!r}")

    @property
    def is_unmodified(self) -> bool:
        """Whether tokens are drawn from the model's own distribution."""
        return self.temperature == 1 and self.top_p == 1 and self.top_k == -1


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled by weights of `version`.

    VersionSpan(version=3, start=0, end=17)
    """

    version: int
    start: int
    end: int


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """The model generated a stop token, which is the last of `token_ids`, or a stop text."""
    LENGTH = "length"
    """`max_tokens` was reached in the middle of a turn."""
    ABORT = "abort"
    """The request was aborted; the tokens so far are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One generation, exactly as sampled.

    Raises ValueError when the record is inconsistent: lengths differ, a logprob is not finite or is positive, or the
    version spans do not tile [0, T). So every Completion is safe to train on.

    >>> span = VersionSpan(version=0, start=0, end=1)
    >>> one = {"token_ids": (5,), "version_spans": (span,), "finish_reason": FinishReason.STOP}
    >>> Completion(behavior_logprobs=(0.1,), **one)
    Traceback (most recent call last):
    ValueError: logprob of token 0 is 0.1: it must be finite and <= 0
    """

    token_ids: tuple[int, ...]  # [T]
    behavior_logprobs: tuple[float, ...]  # [T] natural log, under the distribution that was sampled from
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    times: tuple[float, float] = field(default=(0.0, 0.0), compare=False)  # Unix s: asked for, answered; 0: unknown

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        if len(self.behavior_logprobs) != num_tokens:
            raise ValueError(f"{num_tokens} tokens but {len(self.behavior_logprobs)} logprobs")
        # `map` and `max` run in C: a Python loop takes a tenth of a turn's time. The loop below only names the token.
        if not all(map(math.isfinite, self.behavior_logprobs)) or max(self.behavior_logprobs, default=0.0) > 0:
            for t, logprob in enumerate(self.behavior_logprobs):
                if not math.isfinite(logprob) or logprob > 0:
                    raise ValueError(f"logprob of token {t} is {logprob}: it must be finite and <= 0")
        position = 0
        for span in self.version_spans:
            if span.start != position or span.end <= span.start:
                raise ValueError(f"version spans {self.version_spans} do not tile [0, {num_tokens})")
            position = span.end
        if position != num_tokens:
            raise ValueError(f"version spans end at {position}, completion has {num_tokens} tokens")

    def policy_versions(self) -> Iterator[int]:
        """The policy version of every token, in order. [T]"""
        return (span.version for span in self.version_spans for _ in range(span.start, span.end))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The tokens that were appended before a generation, and the generation.

    `observation_ids` are the new tokens only: the whole first prompt at turn 0, later the rendered tool output with its
    glue. The prompt of turn n is the concatenation of everything before its completion: nothing is rendered again.
    Example: `Turn(observation_ids=(1, 2), completion=completion)`.
    """

    observation_ids: tuple[int, ...]
    completion: Completion
    reward: float = 0.0  # what `step` returned for it, times its weight; a part of the trajectory's reward


class StopReason(StrEnum):
    """Every way an episode can end. Infrastructure failures are not among them: they raise."""

    COMPLETED = "completed"
    """The environment returned `terminated`."""
    MAX_TURNS = "max_turns"
    """The turn budget was used up."""
    MAX_CONTEXT = "max_context"
    """The context was full: no room was left for another turn, or it cut a turn (`rollout.max_context`).
    Episodes recorded before MAX_TURN_TOKENS existed have this reason for both."""
    MAX_TURN_TOKENS = "max_turn_tokens"
    """A turn used up its own budget and was cut (`rollout.max_turn_tokens`)."""
    TRUNCATED = "truncated"
    """The environment returned `truncated`."""
    TIMEOUT = "timeout"
    """The episode's deadline passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode, or a segment of one: tokens for the learner, messages for people, rewards.

    trajectory.token_ids(), trajectory.action_mask(), trajectory.behavior_logprobs()  # [T] each
    """

    id: str
    task_id: str
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    reward: float  # weighted sum of `rewards`
    rewards: dict[str, float]
    stop_reason: StopReason
    info: dict[str, float] = field(default_factory=dict)  # counts: tool_calls, tool_errors, tool_s, wall_s, ...
    weight: float = 1.0  # share in the gradient: 1/S of each of an episode's S segments; 0 masks it from the loss

    @property
    def policy_version(self) -> int:
        """The oldest version among the action tokens, from which lag is measured. Raises ValueError without any."""
        return min(span.version for turn in self.turns for span in turn.completion.version_spans)

    @property
    def num_action_tokens(self) -> int:
        """Number of tokens sampled by the model, over all turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    def token_ids(self) -> list[int]:
        """All tokens, observations and actions in order. [T]"""
        return [i for turn in self.turns for i in (*turn.observation_ids, *turn.completion.token_ids)]

    def action_mask(self) -> list[int]:
        """1 where the model sampled the token, 0 for prompt, tool output and glue. [T]"""
        return self._per_token(lambda completion: [1] * len(completion.token_ids), fill=0)

    def behavior_logprobs(self) -> list[float]:
        """Logprob at sampling for action tokens, 0.0 elsewhere. [T]"""
        return self._per_token(lambda completion: completion.behavior_logprobs, fill=0.0)

    def policy_versions(self) -> list[int]:
        """Version of the weights that sampled each action token, -1 elsewhere. [T]"""
        return self._per_token(lambda completion: list(completion.policy_versions()), fill=-1)

    def _per_token(self, of_action: Any, *, fill: Any) -> list[Any]:
        out: list[Any] = []
        for turn in self.turns:
            out.extend([fill] * len(turn.observation_ids))
            out.extend(of_action(turn.completion))
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """One play of a task: the trajectories (segments) that it produced, oldest first.

    Most are one; compaction, or an agent that branches, makes several, each with its reward. ValueError: none.

        EpisodeRecord(id="train-7-0", segments=(trajectory,)).reward
    """

    id: str  # unique in a run: KIND-GROUP-MEMBER
    segments: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError(f"episode {self.id} has no segment")

    @property
    def reward(self) -> float:
        """The reward of the whole episode."""
        return self.segments[0].reward


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The episodes of one task: the scope of the baseline. `group_id` is unique in a run and rises with admission.

    TrajectoryGroup(group_id=7, task=task, episodes=(first, second)).episode_rewards  # [1.0, 0.0]
    """

    group_id: int
    task: Task
    episodes: tuple[EpisodeRecord, ...]

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All segments of all episodes, in order. [G]"""
        return tuple(segment for episode in self.episodes for segment in episode.segments)

    @property
    def policy_version(self) -> int:
        """The oldest version in the group."""
        return min(trajectory.policy_version for trajectory in self.trajectories)

    @property
    def rewards_G(self) -> list[float]:
        """One reward per trajectory. [G]"""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def episode_rewards(self) -> list[float]:
        """One reward per episode."""
        return [episode.reward for episode in self.episodes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups of one optimizer step. The learner must be at `policy_version`, and checks lag <= max_lag itself.

    Batch(policy_version=4, max_lag=1, groups=groups)
    """

    policy_version: int
    max_lag: int | None  # None: any lag is allowed
    groups: tuple[TrajectoryGroup, ...]
    num_replayed: int = 0  # the last of `groups`: they were trained before, and may have any lag
    num_missing: int = 0  # above 0: a part of the batch; so many of its groups are still played

    def trajectories(self) -> Sequence[Trajectory]:
        """All trajectories, group by group. [B]"""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def num_episodes(self) -> int:
        """Number of episodes; each has one or more trajectories."""
        return sum(len(group.episodes) for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class SumSigma:
    """Spread of the summed log-ratio (learner - engine) over stretches of sampled tokens.

    SumSigma(length=256, sigma=0.5, num_sums=40)
    """

    length: int  # tokens in a row; 1: the root mean square of single tokens
    sigma: float  # standard deviation, nats
    num_sums: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Result of one optimizer step. `policy_version` is the version *after* it; `metrics` are finite numbers.

    StepOutput(policy_version=5, metrics={"learner/grad_norm": 0.1}, ess_ratio=0.9)
    """

    policy_version: int
    metrics: dict[str, float]
    ess_ratio: float | None = None  # of the batch; None if it was not measured
    resumable_from: int | None = None  # oldest version with a checkpoint; None without any
    wait_batch_s: float = 0.0  # time the learner waited for the batch of this step
    skipped: bool = False  # the step was refused: the new version has the weights of the one before
    parity_max_abs: float | None = None  # |engine - learner| logprobs of fresh sampled tokens, nats; None without any
    parity_mean_abs: float | None = None
    parity_sigmas: tuple[SumSigma, ...] = ()  # of the same tokens; those lengths of which there were enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A text scored by the learner under new weights. Unless the engine scores it the same, the update is refused.

    Probe(token_ids=(5, 7, 9), logprobs=(-0.3, -1.2))
    """

    token_ids: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T-1] log p(token[t+1] | token[:t+1])


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRef:
    """Weights of one version on their way to the engines, with the proof that an engine loaded them.

    WeightsRef(policy_version=5, num_bytes=10**9, update_info={"path": "/runs/a/v5"}, checksum="...", probe=probe)
    """

    policy_version: int
    num_bytes: int  # that travel: of all weights, or of what changed
    update_info: dict[str, Any]  # for vLLM's /update_weights; {"path": FOLDER, "deltas": [...]} if they are in folders
    checksum: str  # agentrl.engine.checksum of all tensors; empty if the engine cannot compute its own
    probe: Probe

    @property
    def path(self) -> str | None:
        """The folder that holds the weights; None if they are sent from process to process."""
        return self.update_info.get("path")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferInit:
    """How engines join the learner's group: the body of vLLM's /init_weight_transfer_engine.

    Example: `TransferInit(init_info={"master_address": "10.0.0.5", "master_port": 29500, "world_size": 2})`.
    """

    init_info: dict[str, Any]
