"""Frozen records that cross a stage: task -> turn -> trajectory -> group -> batch -> step output.

Knows nothing of HTTP, models or tokenizers. Shape legend for every name below: _B trajectories, _T tokens, _G members
of a group. All records are plain dataclasses, so msgspec carries them over the wire without a second definition.
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
    """One call the model asked for. `arguments` is parsed JSON, not yet validated against the tool's schema."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat turn in message space. Environments speak messages; only the renderer speaks tokens."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


def system(content: str) -> Message:
    """Shorthand for a system message."""
    return Message(role="system", content=content)


def user(content: str) -> Message:
    """Shorthand for a user message."""
    return Message(role="user", content=content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row to solve. `answer` stays on the trusted side: it never enters a prompt or the sandbox."""

    id: str
    prompt: str
    answer: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What one generation is asked for. The defaults are the only ones whose logprobs need no correction.

    Raises ValueError, naming the field, for what cannot be sampled from.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the generation. The token that completes one is kept whole, and is the last."""
    seed: int | None = None
    """The same request with the same seed has the same answer, where the engine can promise that: docs/resume.md."""

    def __post_init__(self) -> None:
        for name, is_right, wanted in (
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("temperature", 0 <= self.temperature < math.inf, ">= 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 or >= 1"),
            ("stop", all(self.stop), "texts that are not empty"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "in [0, 2^63)"),
        ):
            if not is_right:
                raise ValueError(f"sampling: {name} must be {wanted}, got {getattr(self, name)!r}")

    @property
    def is_unmodified(self) -> bool:
        """Whether tokens are drawn from the model's own distribution."""
        return self.temperature == 1 and self.top_p == 1 and self.top_k == -1


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled by weights `version`."""

    version: int
    start: int
    end: int


class FinishReason(StrEnum):
    """Why the engine stopped writing."""

    STOP = "stop"
    """The model wrote a stop token; it is the last of `token_ids`."""
    LENGTH = "length"
    """`max_tokens` was reached in the middle of a turn."""
    ABORT = "abort"
    """The request was aborted; what was written so far is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One generation, exactly as sampled.

    Raises ValueError at construction when the record cannot be true: lengths differ, a logprob is not finite or is
    positive, or the version spans do not tile [0, T). A completion that exists is therefore safe to train on.
    """

    token_ids: tuple[int, ...]  # [T]
    behavior_logprobs: tuple[float, ...]  # [T] natural log, of the very distribution sampled from
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        if len(self.behavior_logprobs) != num_tokens:
            raise ValueError(f"{num_tokens} tokens but {len(self.behavior_logprobs)} logprobs")
        # In C, since it is a tenth of a turn's time otherwise; the loop names the culprit.
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
        for span in self.version_spans:
            for _ in range(span.start, span.end):
                yield span.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What was appended before the model spoke, then what it said.

    `observation_ids` are the new tokens only (the whole first prompt at turn 0; later the rendered tool output, glue
    included). The prompt of turn n is everything before its completion, concatenated: nothing is ever re-rendered.
    """

    observation_ids: tuple[int, ...]
    completion: Completion


class StopReason(StrEnum):
    """Every way an episode can end that is the model's doing. Infrastructure failures raise instead."""

    COMPLETED = "completed"
    """The environment said `terminated`."""
    MAX_TURNS = "max_turns"
    """The turn budget was spent."""
    MAX_CONTEXT = "max_context"
    """No room was left for another turn, or a turn was cut by its token budget."""
    TRUNCATED = "truncated"
    """The environment said `truncated` for a reason of its own."""
    TIMEOUT = "timeout"
    """The episode's own wall-clock budget was spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode: its tokens (for the learner), its messages (for people), its rewards."""

    id: str
    task_id: str
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    reward: float  # weighted sum of `rewards`
    rewards: dict[str, float]
    stop_reason: StopReason
    info: dict[str, float] = field(default_factory=dict)  # counts: tool_calls, tool_errors, sandbox_s, wall_s, ...
    weight: float = 1.0  # share in the gradient: 1/S of each of an episode's S segments; 0 masks it from the loss

    @property
    def policy_version(self) -> int:
        """The oldest version among the action tokens: what lag is measured from. Raises ValueError without any."""
        return min(span.version for turn in self.turns for span in turn.completion.version_spans)

    @property
    def num_action_tokens(self) -> int:
        """Tokens sampled by the model, over all turns."""
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
        """Weights that sampled each action token, -1 elsewhere. [T]"""
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

    Most episodes are one segment. An episode whose context was compacted, or an agent that branched its conversation,
    has several; each carries the reward of the whole episode. Raises ValueError without a segment.

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
    """What one optimizer step consumes. The learner must stand at `policy_version` and checks lag <= max_lag itself."""

    policy_version: int
    max_lag: int
    groups: tuple[TrajectoryGroup, ...]

    def trajectories(self) -> Sequence[Trajectory]:
        """All trajectories, group by group. [B]"""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def num_episodes(self) -> int:
        """Number of episodes; each has one or more trajectories."""
        return sum(len(group.episodes) for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Result of one optimizer step. `policy_version` is the version *after* it; `metrics` are finite numbers."""

    policy_version: int
    metrics: dict[str, float]
    ess_ratio: float | None = None  # of the batch; None where it could not be measured
    resumable_from: int | None = None  # the oldest version of which a checkpoint is kept; None without any
    wait_batch_s: float = 0.0  # time the learner waited for the batch of this step


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A text scored by the learner under fresh weights; the engine must score it alike or the update is refused."""

    token_ids: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T-1] log p(token[t+1] | token[:t+1])


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRef:
    """Weights of one version on their way to the engines, and what proves that an engine took them."""

    policy_version: int
    num_bytes: int
    update_info: dict[str, Any]  # for vLLM's /update_weights; {"path": FOLDER} where they lie complete in a folder
    checksum: str  # agentrl.engine.checksum of all tensors; empty where the engine cannot be asked for its own
    probe: Probe

    @property
    def path(self) -> str | None:
        """The folder that holds the weights; None where they travel from process to process."""
        return self.update_info.get("path")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferInit:
    """What engines must know to join the learner's group: for vLLM's /init_weight_transfer_engine."""

    init_info: dict[str, Any]


ROUNDING = 1e-9
"""Rewards are weighted sums of floats: equal ones may differ in their last bits, which a standard deviation of their
own size would blow up to a whole advantage."""


def has_spread(rewards_G: Sequence[float]) -> bool:
    """Whether max R - min R > 1e-9 max(1, max |R|): if not, no action is known to be better than another.

    False for no member and for one. NaN and infinities among several are spread, so that whoever refuses the step sees
    them.
    """
    if len(rewards_G) < 2:
        return False
    if not all(map(math.isfinite, rewards_G)):
        return True
    return max(rewards_G) - min(rewards_G) > ROUNDING * max(1.0, *map(abs, rewards_G))
