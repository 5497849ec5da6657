"""The rows that a viewer shows: runs, episodes, groups, messages, tokens. Independent of where they are read from.

`flat` makes a JSON object of a row; a named number such as a reward becomes the column `rewards/NAME`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from agentrl.run_folder import EpisodeKind

MAX_EXCERPT = 200
"""Characters of a long text in a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run: what a list of runs shows.

    Example: `RunRow(run="quickstart", state="done", sentence="The run is done", steps=12)`.
    """

    run: str  # name of its folder
    state: str  # of `agentrl status`; "unknown" without a status file
    sentence: str
    steps: int  # last step that was measured
    num_steps: int | None = None  # that the config asks for
    env: str = ""
    model: str = ""
    started_s: float | None = None  # Unix time of the first measurement
    ended_s: float | None = None  # Unix time of the last measurement
    eval_first: float | None = None  # avg@n of the first held-out measurement
    eval_last: float | None = None
    problems: tuple[str, ...] = ()  # what could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode, without its messages and tokens.

    Example: `EpisodeRow(kind="train", step=3, group_id=7, episode_id="train-7-0", task_id="a", reward=1.0, ...)`.
    """

    kind: EpisodeKind
    step: int  # whose batch it is in; of an evaluation, the policy version that was measured
    eval_set: str = ""  # of eval.sets, where the run has several
    group_id: int
    episode_id: str
    task_id: str
    member: int  # place in its group, from 0
    reward: float
    above_mean: float  # reward minus the mean reward of its group
    correct: bool
    stop_reason: str
    turns: int
    tokens: int  # sampled
    segments: int
    oldest_version: int | None  # of the policy; None without a token record
    newest_version: int | None
    lag: int | None  # learner version minus oldest version, when it was trained
    weight: float  # share in the gradient
    tool_calls: int
    tool_errors: int
    wall_s: float | None
    prompt: str  # beginning of the task's prompt
    answer: str | None  # gold answer
    final: str  # beginning of the last text that the model wrote
    rewards: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, float] = field(default_factory=dict)
    generated_at: tuple[tuple[float, float], ...] = ()  # of each turn, as Completion.times; no column


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """The episodes of one task, summed up.

    Example: `GroupRow(kind="train", step=3, group_id=7, task_id="a", size=8, reward_mean=0.5, ...)`.
    """

    kind: EpisodeKind
    step: int
    eval_set: str = ""
    group_id: int
    task_id: str
    size: int  # episodes
    reward_mean: float
    reward_std: float  # of the population
    reward_min: float
    reward_max: float
    num_correct: int
    tokens: int  # sampled, of all episodes
    turns_mean: float
    lag: int | None  # the largest of its episodes
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRow:
    """One message of an episode, whole.

    Example: `MessageRow(episode_id="train-7-0", step=3, segment=0, position=1, role="user", content="2 + 2?")`.
    """

    kind: EpisodeKind
    step: int
    eval_set: str = ""
    group_id: int
    episode_id: str
    segment: int
    position: int
    role: str
    content: str
    tool_call_id: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()  # id, name, arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One token of an episode.

    Example: `TokenRow(episode_id="train-7-0", position=20, token_id=42, text="4", sampled=True, logprob=-0.1, ...)`.
    """

    kind: EpisodeKind
    step: int
    eval_set: str = ""
    group_id: int
    episode_id: str
    segment: int
    position: int
    turn: int
    token_id: int
    text: str | None  # None without the model's tokenizer
    sampled: bool  # by the model; the others are prompt and tool output
    logprob: float | None  # at sampling, natural log; None where it was not sampled
    version: int | None  # of the policy that sampled it


def flat(row: Any) -> dict[str, Any]:
    """The row as a JSON object. Named numbers get a column each: rewards/NAME, info/NAME."""
    values: dict[str, Any] = {}
    for one in fields(row):
        value = getattr(row, one.name)
        if one.name in ("rewards", "info"):
            values |= {f"{one.name}/{name}": number for name, number in value.items()}
        elif one.name != "generated_at":
            values[one.name] = value
    return values


def excerpt(text: str) -> str:
    """The beginning of a text in one line.

    >>> excerpt("What is\\n  2 + 2?")
    'What is 2 + 2?'
    """
    line = " ".join(text[: 4 * MAX_EXCERPT].split())
    return line if len(line) <= MAX_EXCERPT else line[: MAX_EXCERPT - 1] + "…"
