"""All episodes of a run as rows. A file is read once, and again only when it has changed.

Independent of journals and metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from agentrl.run_folder import EpisodeKind, RunFolder
from agentrl.view.rows import EpisodeRow, GroupRow, excerpt
from agentrl.view.trajectory_files import IndexedSegment, TrajectoryFile, episode_of, thinned, trajectory_files

FileKey = tuple[EpisodeKind, int, str]
"""Kind, step, held-out set."""


class EpisodeIndex:
    """The episodes of one run, by file; `refresh` reads what is new. `max_files`: a sample, spread over the steps.

    Example:
        index = EpisodeIndex(RunFolder.open("runs/quickstart"))
        index.refresh()
        [row.reward for row in index.episodes(kind="train", step=3)]
    """

    def __init__(self, run: RunFolder, *, max_files: int | None = None) -> None:
        self._run = run
        self._max_files = max_files
        self._rows: dict[FileKey, tuple[tuple[int, int], list[EpisodeRow], list[str]]] = {}
        self.is_sample = False

    def refresh(self) -> bool:
        """Read files that are new or were replaced, forget those that are gone. True if anything changed."""
        changed = False
        here = {(one.kind, one.step, one.eval_set): one for one in self._files()}
        for gone in self._rows.keys() - here.keys():
            del self._rows[gone]
            changed = True
        for key, file in here.items():
            try:
                stamp = file.stamp()
            except OSError:  # replaced or deleted in this moment; the next refresh sees it
                continue
            if key not in self._rows or self._rows[key][0] != stamp:
                problems: list[str] = []
                self._rows[key] = (stamp, list(episode_rows(file, problems)), problems)
                changed = True
        return changed

    def steps(self) -> list[FileKey]:
        """The key of each file, training first, by step."""
        return sorted(self._rows, key=lambda key: (key[0] != "train", key[1], key[2]))

    def episodes(
        self, *, kind: EpisodeKind | None = None, step: int | None = None, eval_set: str | None = None
    ) -> Iterator[EpisodeRow]:
        """The episodes of a kind, step and held-out set; None: of all."""
        for key in self.steps():
            if kind in (None, key[0]) and step in (None, key[1]) and eval_set in (None, key[2]):
                yield from self._rows[key][1]

    def groups(
        self, *, kind: EpisodeKind | None = None, step: int | None = None, eval_set: str | None = None
    ) -> Iterator[GroupRow]:
        """The groups of a kind, step and held-out set; None: of all."""
        rows = self.episodes(kind=kind, step=step, eval_set=eval_set)
        for _, members in groupby(rows, key=lambda row: (row.kind, row.step, row.eval_set, row.group_id)):
            yield group_row(list(members))

    def problems(self) -> list[str]:
        """What could not be read."""
        return [problem for key in self.steps() for problem in self._rows[key][2]]

    def _files(self) -> list[TrajectoryFile]:
        files = trajectory_files(self._run)
        if self._max_files is None:
            return files
        held_out = [file for file in files if file.kind == "eval"]
        trained = [file for file in files if file.kind == "train"]
        found = [*thinned(trained, self._max_files), *thinned(held_out, self._max_files)]
        self.is_sample = len(found) < len(files)
        return found


def episode_rows(file: TrajectoryFile, problems: list[str]) -> Iterator[EpisodeRow]:
    """The rows of one file; what cannot be read is named in `problems`."""
    for _, lines in groupby(file.segments(problems), key=lambda segment: segment.group_id):
        episodes: dict[str, list[IndexedSegment]] = {}
        for segment in lines:
            episodes.setdefault(episode_of(segment), []).append(segment)
        mean = math.fsum(segments[0].reward for segments in episodes.values()) / len(episodes)
        for member, segments in enumerate(episodes.values()):
            yield _episode_row(file, segments, member=member, mean=mean)


def _episode_row(file: TrajectoryFile, segments: Sequence[IndexedSegment], *, member: int, mean: float) -> EpisodeRow:
    first = segments[0]
    versions = [version for segment in segments for version in segment.policy_versions if version >= 0]
    oldest = min(versions, default=None)
    turns = [turn for segment in segments for turn in segment.turns]
    info = first.info
    return EpisodeRow(
        kind=file.kind,
        step=file.step,
        eval_set=file.eval_set,
        group_id=first.group_id,
        episode_id=episode_of(first),
        task_id=first.task.id,
        member=member,
        reward=first.reward,
        above_mean=first.reward - mean,
        correct=first.rewards.get("correct", first.reward) >= 1.0,
        stop_reason=str(first.stop_reason),
        turns=len(turns) or int(info.get("turns", 0)),
        tokens=sum(turn.num_action_tokens for turn in turns) or int(info.get("completion_tokens", 0)),
        segments=len(segments),
        oldest_version=oldest,
        newest_version=max(versions, default=None),
        lag=file.step - 1 - oldest if file.kind == "train" and oldest is not None else None,
        weight=first.weight,
        tool_calls=int(info.get("tool_calls", 0)),
        tool_errors=int(info.get("tool_errors", 0)),
        wall_s=info.get("wall_s"),
        prompt=excerpt(first.task.prompt),
        answer=first.task.answer,
        final=excerpt(_final_text(segments[-1])),
        rewards=first.rewards,
        info=info,
        generated_at=tuple(turn.times for turn in turns if turn.times[0]),
    )


def _final_text(segment: IndexedSegment) -> str:
    said = (message.content for message in reversed(segment.messages) if message.role == "assistant")
    return next((text for text in said if text), "")


def group_row(members: Sequence[EpisodeRow]) -> GroupRow:
    """The sums of one group's episodes."""
    first, rewards = members[0], [row.reward for row in members]
    mean = math.fsum(rewards) / len(rewards)
    return GroupRow(
        kind=first.kind,
        step=first.step,
        eval_set=first.eval_set,
        group_id=first.group_id,
        task_id=first.task_id,
        size=len(members),
        reward_mean=mean,
        reward_std=math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        reward_min=min(rewards),
        reward_max=max(rewards),
        num_correct=sum(row.correct for row in members),
        tokens=sum(row.tokens for row in members),
        turns_mean=math.fsum(row.turns for row in members) / len(members),
        lag=max((row.lag for row in members if row.lag is not None), default=None),
        prompt=first.prompt,
    )
