"""Reads a run's trajectory files for a viewer: line by line, also where a file is cut off, damaged, or being replaced.

Lines stay bytes until somebody asks for them, so that a large file costs little memory. Independent of rows and pages.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agentrl.run_folder import TRAJECTORIES, EpisodeKind, EpisodeLine, RunFolder, TurnSize, label, old_episode_id
from agentrl.types import Message, StopReason, Task

KINDS: tuple[EpisodeKind, ...] = ("train", "eval")
_HOW_TO_FIX = "the other files are shown; the run can be continued and writes the step again if it is made again"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedSegment:
    """What an index needs of an EpisodeLine: everything but the tokens.

    Example: `episode_of(segment), len(segment.turns)`.
    """

    group_id: int
    task: Task
    id: str
    reward: float
    rewards: dict[str, float]
    stop_reason: StopReason
    info: dict[str, float]
    messages: tuple[Message, ...]
    turns: tuple[TurnSize, ...]
    policy_versions: tuple[int, ...]
    weight: float = 1.0
    episode_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupOnly:
    group_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFile:
    """One step's file.

    Example: `for segment in TrajectoryFile.of(run, "train", 3).segments(problems): ...`
    """

    path: Path
    kind: EpisodeKind
    step: int
    eval_set: str = ""

    @classmethod
    def of(cls, run: RunFolder, kind: EpisodeKind, step: int, eval_set: str = "") -> TrajectoryFile:
        """The file of a step, which may be missing."""
        path = run.trajectories / f"{label(kind, eval_set)}_{step:06d}.jsonl.gz"
        return cls(path=path, kind=kind, step=step, eval_set=eval_set)

    def stamp(self) -> tuple[int, int]:
        """Changes whenever the file is replaced. Raises OSError."""
        found = self.path.stat()
        return found.st_mtime_ns, found.st_size

    def lines(self, problems: list[str]) -> Iterator[bytes]:
        """The lines that can be read; what stopped the reading is appended to `problems`."""
        try:
            with gzip.open(self.path) as file:
                yield from file
        except FileNotFoundError:
            problems.append(f"{self.path.name} is missing")
        except (OSError, EOFError, zlib.error) as error:
            problems.append(f"{self.path.name} is damaged or cut off ({error}): {_HOW_TO_FIX}")

    def segments(self, problems: list[str]) -> Iterator[IndexedSegment]:
        """Every line without its tokens; lines that cannot be read are named in `problems`."""
        decoder = msgspec.json.Decoder(IndexedSegment)
        for number, line in enumerate(self.lines(problems), start=1):
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                problems.append(f"{self.path.name}, line {number} cannot be read ({error}): it is left out")

    def groups(self, problems: list[str]) -> Iterator[tuple[int, list[bytes]]]:
        """The lines of each group; `decoded` reads them."""
        decoder = msgspec.json.Decoder(_GroupOnly)
        group_id, lines = -1, list[bytes]()
        for number, line in enumerate(self.lines(problems), start=1):
            try:
                found = decoder.decode(line).group_id
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                problems.append(f"{self.path.name}, line {number} cannot be read ({error}): it is left out")
                continue
            if found != group_id and lines:
                yield group_id, lines
                lines = []
            group_id = found
            lines.append(line)
        if lines:
            yield group_id, lines


def decoded(lines: Iterable[bytes]) -> list[EpisodeLine]:
    """The segments, with everything. Raises msgspec.DecodeError for a line that misses a field."""
    decoder = msgspec.json.Decoder(EpisodeLine)
    return [decoder.decode(line) for line in lines]


def episode_of(segment: EpisodeLine | IndexedSegment) -> str:
    """The id of the episode, also in an old file."""
    return segment.episode_id or old_episode_id(segment.id)


def trajectory_files(run: RunFolder) -> list[TrajectoryFile]:
    """The files that there are, training first, by step. A file whose name is no step is not one of them."""
    found = []
    for path in run.trajectories.glob("*.jsonl.gz"):
        if name := TRAJECTORIES.fullmatch(path.name):
            kind: EpisodeKind = "train" if name["kind"] == "train" else "eval"
            found.append(TrajectoryFile(path=path, kind=kind, step=int(name["step"]), eval_set=name["set"] or ""))
    return sorted(found, key=lambda one: (KINDS.index(one.kind), one.step, one.eval_set))


def thinned(files: Sequence[TrajectoryFile], max_files: int) -> list[TrajectoryFile]:
    """At most about `max_files` of them, spread evenly over the steps, with the first and the last."""
    if len(files) <= max_files:
        return list(files)
    places = {round(place * (len(files) - 1) / (max_files - 1)) for place in range(max_files)}
    return [files[place] for place in sorted(places)]
