"""The folder of a run: where each file is, and how episodes are written to it and read from it.

Independent of engines, learners and how the numbers are computed.
"""

from __future__ import annotations

import difflib
import fcntl
import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec

from agentrl.config import Config
from agentrl.errors import ConfigError, DiskError
from agentrl.types import (
    Completion,
    EpisodeRecord,
    FinishReason,
    Message,
    StopReason,
    Task,
    Trajectory,
    TrajectoryGroup,
    Turn,
    VersionSpan,
)

EpisodeKind = Literal["train", "eval"]
OUT_DIR: str = Config.model_fields["out_dir"].default
MAX_NAMES = 10_000
TRAJECTORIES = re.compile(r"(?P<kind>train|eval)(?:-(?P<set>.+))?_(?P<step>\d+)\.jsonl\.gz")
"""The names of trajectory files: kind, held-out set, step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSize:
    """How many of an episode's tokens belong to one turn: first the observation, then the model's action.

    Example: `TurnSize(num_observation_tokens=20, num_action_tokens=5, finish_reason=FinishReason.STOP)`.
    """

    num_observation_tokens: int
    num_action_tokens: int
    finish_reason: FinishReason
    times: tuple[float, float] = (0.0, 0.0)  # of its generation, as in Completion
    reward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLine:
    """One line of a trajectories file: an episode as flat per-token arrays, which any tool can read.

    Example: `zcat trajectories/train_000001.jsonl.gz | head -1`.
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
    token_ids: tuple[int, ...]  # [T]
    action_mask: tuple[int, ...]  # [T] 1 where the model sampled the token
    behavior_logprobs: tuple[float, ...]  # [T] 0.0 where the mask is 0
    policy_versions: tuple[int, ...]  # [T] -1 where the mask is 0
    weight: float = 1.0  # share in the gradient
    episode_id: str = ""  # the episode this is a segment of; empty in old files


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """`runs/NAME/`: config.json, metrics.jsonl, tensorboard/, trajectories/, checkpoints/, journal.sqlite, logs/.

    Example:
        run = RunFolder.open("runs/quickstart")
        groups = run.read_trajectories(run.trajectory_steps()[-1])
    """

    path: Path

    @classmethod
    def create(cls, out_dir: str | Path, name: str, *, config: Config) -> RunFolder:
        """Create `out_dir/name`, or `name-2`, `-3`, ... where that is taken, and save the resolved config in it.

        Raises ConfigError when the name is not a plain folder name or the folder cannot be made.
        """
        if name in {"", ".", ".."} or Path(name).name != name:
            raise ConfigError(f"name: {name!r} must be a plain folder name, without slashes")
        try:
            folder = cls(path=_claim(Path(out_dir), name))
            for sub in (folder.trajectories, folder.checkpoints):
                sub.mkdir()
            write_atomically(folder.config, (config.model_dump_json(indent=2) + "\n").encode())
        except OSError as error:
            raise ConfigError(
                f"out_dir: cannot make a run folder in {out_dir}: {error.strerror}. Set out_dir to a folder on a disk "
                "with room, in which you may write"
            ) from error
        return folder

    @classmethod
    def open(cls, run: str | Path, *, out_dir: str | Path = OUT_DIR) -> RunFolder:
        """An existing run: its folder, or the name of one in `out_dir`. Raises ConfigError, with the runs there are."""
        for path in (Path(run), Path(out_dir, run)):
            if (path / "config.json").is_file():
                return cls(path=path)
        raise ConfigError(f"{_why_no_run(Path(run), Path(out_dir))}. {_runs_like(Path(run), Path(out_dir))}")

    @property
    def earlier(self) -> Path | None:
        """The folder of an earlier run that has the name of this one, which is therefore NAME-2 or so."""
        namesake = self.path.with_name(json.loads(self.config.read_text())["name"])
        return namesake if namesake != self.path and (namesake / "config.json").is_file() else None

    @property
    def config(self) -> Path:
        """The resolved config, JSON."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of event files."""
        return self.path / "tensorboard"

    @property
    def trajectories(self) -> Path:
        """Folder of gzipped JSONL, one file per step."""
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints and exported weights."""
        return self.path / "checkpoints"

    @property
    def states(self) -> Path:
        """Folder of the learner's own checkpoints, from which it resumes: v20, v40, ..."""
        return self.checkpoints / "states"

    @property
    def journal(self) -> Path:
        """The buffer's SQLite journal."""
        return self.path / "journal.sqlite"

    @property
    def logs(self) -> Path:
        """Folder with one log per process."""
        return self.path / "logs"

    @property
    def report(self) -> Path:
        """The report page, which opens offline."""
        return self.path / "report.html"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run while the block runs. Raises ConfigError when another process has locked it."""
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise ConfigError(
                    f"{self.path} is being trained by process {file.read() or '(unknown)'}; stop that one first"
                ) from None
            with self.writing(self.path / ".lock"):
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            yield

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Wrap code that writes a file of the run. Raises DiskError, which says how to continue, where the disk
        fails."""
        try:
            yield
        except OSError as error:
            raise DiskError(
                f"cannot write {path}: {error.strerror or error}. Free space on its disk (df -h {self.path}), then "
                f"continue with agentrl train --resume {self.path}"
            ) from error

    def write_trajectories(
        self, step: int, groups: Sequence[TrajectoryGroup], *, kind: EpisodeKind = "train", set_name: str = ""
    ) -> Path:
        """Write all episodes of one step, completely or not at all; a second call for the step replaces the first.

        `set_name`: of `eval.sets`, whose episodes they are. Raises DiskError.
        """
        encoder = msgspec.json.Encoder()
        lines = [encoder.encode(line) for group in groups for line in to_lines(group)]
        target = self._trajectories_file(step, kind, set_name)
        with self.writing(target):
            write_atomically(target, gzip.compress(b"".join(line + b"\n" for line in lines), compresslevel=6, mtime=0))
        return target

    def read_trajectories(self, step: int, *, kind: EpisodeKind = "train", set_name: str = "") -> list[TrajectoryGroup]:
        """The groups that were written for the step. Raises FileNotFoundError where there are none."""
        decoder = msgspec.json.Decoder(EpisodeLine)
        with gzip.open(self._trajectories_file(step, kind, set_name)) as lines:
            segments = [decoder.decode(line) for line in lines]
        return [_to_group(list(members)) for _, members in groupby(segments, key=lambda line: line.group_id)]

    def trajectory_steps(self, *, kind: EpisodeKind = "train", set_name: str = "") -> list[int]:
        """The steps that have a trajectories file, ascending."""
        return sorted(step for of_kind, name, step in self._trajectories() if (of_kind, name) == (kind, set_name))

    def trajectory_sets(self) -> list[str]:
        """The held-out sets that have a trajectories file, the earliest measured first; "" without `eval.sets`."""
        first: dict[str, int] = {}
        for kind, name, step in self._trajectories():
            if kind == "eval":
                first[name] = min(step, first.get(name, step))
        return sorted(first, key=lambda name: (first[name], name))

    def _trajectories(self) -> Iterator[tuple[str, str, int]]:
        """Kind, held-out set and step of each file."""
        for path in self.trajectories.glob("*.jsonl.gz"):
            if found := TRAJECTORIES.fullmatch(path.name):
                yield found["kind"], found["set"] or "", int(found["step"])

    def _trajectories_file(self, step: int, kind: EpisodeKind, set_name: str) -> Path:
        return self.trajectories / f"{label(kind, set_name)}_{step:06d}.jsonl.gz"


def label(kind: EpisodeKind, set_name: str) -> str:
    """How files and addresses name a kind of episodes.

    >>> label("train", ""), label("eval", "aime25")
    ('train', 'eval-aime25')
    """
    return f"{kind}-{set_name}" if set_name else kind


def write_atomically(target: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace `target` by `data`: a reader, or a crash at any moment, sees the old file or the new one.

    `durable`: return once the disk holds it. False for what need not survive a power cut. Raises OSError.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        with suppress(OSError):  # the folder may be gone
            temporary.unlink(missing_ok=True)


def _why_no_run(run: Path, out_dir: Path) -> str:
    if run.is_dir():
        return f"{run} is not a run folder: it has no config.json"
    if run.exists():
        return f"{run} is a file, and not the folder of a run"
    where = f"neither here nor in {out_dir}/" if run.name == str(run) else "there is no such folder"
    return f"there is no run {run}: {where}"


def _runs_like(run: Path, out_dir: Path) -> str:
    """The runs with a similar name, or else the newest."""
    configs = sorted(out_dir.glob("*/config.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    names = [path.parent.name for path in configs]
    if not names:
        return f"There is no run in {out_dir}/ yet: `agentrl train CONFIG` makes one"
    near = difflib.get_close_matches(run.name, names, n=5) or [name for name in names if run.name in name]
    return f"{'Similar' if near else 'The newest'}: {', '.join(str(out_dir / name) for name in (near or names)[:5])}"


def _claim(out_dir: Path, name: str) -> Path:
    """Create an empty folder for this run only: of two runs with one name that start together, one makes `logs`
    first."""
    for candidate in _candidates(out_dir, name):
        candidate.mkdir(parents=True, exist_ok=True)
        if not any(candidate.iterdir()):
            with suppress(FileExistsError):
                (candidate / "logs").mkdir()
                return candidate
    raise ConfigError(f"name: {out_dir / name} and {MAX_NAMES} numbered names after it are taken")


def _candidates(out_dir: Path, name: str) -> Iterator[Path]:
    yield out_dir / name
    for number in range(2, MAX_NAMES):
        yield out_dir / f"{name}-{number}"


def to_lines(group: TrajectoryGroup) -> Iterator[EpisodeLine]:
    """The lines of a trajectories file for one group: one per segment of each episode."""
    for episode in group.episodes:
        for segment in episode.segments:
            yield _to_line(group, episode, segment)


def _to_line(group: TrajectoryGroup, episode: EpisodeRecord, trajectory: Trajectory) -> EpisodeLine:
    sizes = tuple(
        TurnSize(
            num_observation_tokens=len(turn.observation_ids),
            num_action_tokens=len(turn.completion.token_ids),
            finish_reason=turn.completion.finish_reason,
            times=turn.completion.times,
            reward=turn.reward,
        )
        for turn in trajectory.turns
    )
    return EpisodeLine(
        group_id=group.group_id,
        task=group.task,
        id=trajectory.id,
        reward=trajectory.reward,
        rewards=trajectory.rewards,
        stop_reason=trajectory.stop_reason,
        info=trajectory.info,
        messages=trajectory.messages,
        turns=sizes,
        token_ids=tuple(trajectory.token_ids()),
        action_mask=tuple(trajectory.action_mask()),
        behavior_logprobs=tuple(trajectory.behavior_logprobs()),
        policy_versions=tuple(trajectory.policy_versions()),
        weight=trajectory.weight,
        episode_id=episode.id,
    )


def _to_group(lines: Sequence[EpisodeLine]) -> TrajectoryGroup:
    segments = [(line.episode_id or old_episode_id(line.id), _to_trajectory(line)) for line in lines]
    return TrajectoryGroup(group_id=lines[0].group_id, task=lines[0].task, episodes=to_episodes(segments))


def to_episodes(segments: Iterable[tuple[str, Trajectory]]) -> tuple[EpisodeRecord, ...]:
    """Group (episode id, segment) pairs by episode, in order of first appearance."""
    found: dict[str, list[Trajectory]] = {}
    for episode_id, trajectory in segments:
        found.setdefault(episode_id, []).append(trajectory)
    return tuple(EpisodeRecord(id=episode_id, segments=tuple(members)) for episode_id, members in found.items())


def old_episode_id(trajectory_id: str) -> str:
    """The episode of a trajectory in old files, which have no episode ids: segments were named EPISODE.SEGMENT."""
    return trajectory_id.partition(".")[0]


def _to_trajectory(line: EpisodeLine) -> Trajectory:
    return Trajectory(
        id=line.id,
        task_id=line.task.id,
        turns=tuple(_to_turns(line)),
        messages=line.messages,
        reward=line.reward,
        rewards=line.rewards,
        stop_reason=line.stop_reason,
        info=line.info,
        weight=line.weight,
    )


def _to_turns(line: EpisodeLine) -> Iterator[Turn]:
    end = 0
    for size in line.turns:
        start = end + size.num_observation_tokens
        observation_ids, end = line.token_ids[end:start], start + size.num_action_tokens
        completion = Completion(
            token_ids=line.token_ids[start:end],
            behavior_logprobs=line.behavior_logprobs[start:end],
            version_spans=_spans(line.policy_versions[start:end]),
            finish_reason=size.finish_reason,
            times=size.times,
        )
        yield Turn(observation_ids=observation_ids, completion=completion, reward=size.reward)


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Sequences of equal versions. `versions` [T]; the spans tile [0, T)."""
    spans: list[VersionSpan] = []
    for version, run in groupby(versions):
        start = spans[-1].end if spans else 0
        spans.append(VersionSpan(version=version, start=start, end=start + len(list(run))))
    return tuple(spans)
