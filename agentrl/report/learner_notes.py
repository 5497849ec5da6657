"""What the learner made of each trained episode: its weight, advantage, part in the baseline; and of its tokens.

The learner writes a file a step beside the episodes, and viewers read it. Independent of how the numbers come about.
Shapes: _N action tokens of a trajectory.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agentrl.run_folder import RunFolder, write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNotes:
    """Of the action tokens of one trajectory, in order; None: not finite.

    Example: `TokenNotes(log_ratio_N=(0.1,), weight_N=(1.1,), advantage_N=(), entropy_N=(0.7,))`.
    """

    log_ratio_N: tuple[float | None, ...]  # log pi - log mu, of the learner over the policy that sampled
    weight_N: tuple[float | None, ...]  # in use, after truncation, masking or clipping
    advantage_N: tuple[float | None, ...]  # empty where every token has that of the trajectory
    entropy_N: tuple[float | None, ...]  # nats


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """One trajectory of a step. None: not finite, or not measured under this objective.

    Its part in the step's gradient is `weight * advantage` times its score, whose norm is `score_norm`.
    Example: `learner_notes.read(run, 12)["train-7-0"].advantage`.
    """

    id: str  # of the trajectory
    log_weight: float | None  # of the importance weight, untruncated
    weight: float | None  # in use, the mean over its tokens
    num_clipped: int  # weights that were truncated, masked or clipped
    advantage: float | None  # about the group's final baseline, divided by its deviation if so set
    score_norm: float | None  # of the gradient of its log-probability, divided by its length if the loss is
    baseline_share: float | None  # of its episode in the optimal baseline: w^2 n^2 / sum of the group
    baseline_minus_mean: float | None  # of its group
    is_refused: bool  # the step was refused: nothing was pushed
    tokens: TokenNotes | None = None


def path_of(run: RunFolder, step: int) -> Path:
    """The file of a step, which may be missing."""
    return run.path / "annotations" / f"train_{step:06d}.jsonl.gz"


def write(run: RunFolder, step: int, annotations: Iterable[Annotation]) -> None:
    """Write the file of a step, in the place of one that an earlier attempt wrote. Raises OSError."""
    encoder = msgspec.json.Encoder()
    lines = b"".join(encoder.encode(one) + b"\n" for one in annotations)
    target = path_of(run, step)
    target.parent.mkdir(exist_ok=True)
    write_atomically(target, gzip.compress(lines, compresslevel=3, mtime=0), durable=False)


def read(run: RunFolder, step: int) -> dict[str, Annotation]:
    """By the id of the trajectory; empty without a file. Raises OSError, EOFError, msgspec.DecodeError."""
    try:
        data = gzip.decompress(path_of(run, step).read_bytes())
    except FileNotFoundError:
        return {}
    decoder = msgspec.json.Decoder(Annotation)
    return {one.id: one for one in map(decoder.decode, data.splitlines())}
