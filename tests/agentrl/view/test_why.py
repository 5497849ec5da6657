"""What the learner made of an episode, beside the episode: as it was written, missing, and damaged."""

from __future__ import annotations

import math

from agentrl.report import learner_notes
from agentrl.report.learner_notes import Annotation, TokenNotes
from agentrl.run_folder import RunFolder
from agentrl.types import TrajectoryGroup
from agentrl.view import documents
from agentrl.view.run_reader import RunReader


def annotate(run: RunFolder, step: int) -> TrajectoryGroup:
    """Notes on every episode of the step, with their tokens; returns its first group."""
    groups = run.read_trajectories(step)
    notes = [
        Annotation(
            id=one.id,
            log_weight=0.1,
            weight=1.5,
            num_clipped=0,
            advantage=one.reward - 0.75,
            score_norm=2.0,
            baseline_share=0.25 + 0.5 * (one.reward - 0.5),
            baseline_minus_mean=0.25,
            is_refused=False,
            tokens=TokenNotes(
                log_ratio_N=(0.1,) * one.num_action_tokens,
                weight_N=(1.5,) * one.num_action_tokens,
                advantage_N=(),
                entropy_N=(math.inf,) * one.num_action_tokens,
            ),
        )
        for group in groups
        for one in group.trajectories
    ]
    learner_notes.write(run, step, notes)
    return groups[0]


def test_a_group_has_the_learner_s_numbers_where_they_are_written(run: RunFolder) -> None:
    group, reader = annotate(run, 2), RunReader(run)
    said = documents.group(reader, "train", 2, group.group_id)
    for one, trajectory in zip(said["episodes"], group.trajectories, strict=True):
        (segment,) = one["segments"]
        assert segment["learner"].advantage == trajectory.reward - 0.75
        assert set(segment["learner"].tokens.entropy_N) == {None}  # not finite
    other = run.read_trajectories(3)[0]
    said = documents.group(reader, "train", 3, other.group_id)
    assert all(segment["learner"] is None for one in said["episodes"] for segment in one["segments"])
    assert "learner's" not in "".join(reader.problems())


def test_notes_that_cannot_be_read_are_named_and_the_group_is_shown(run: RunFolder) -> None:
    group, reader = annotate(run, 2), RunReader(run)
    path = learner_notes.path_of(run, 2)
    path.write_bytes(path.read_bytes()[:-20])
    said = documents.group(reader, "train", 2, group.group_id)
    assert len(said["episodes"]) == 4 and "learner's numbers of step 2" in "".join(reader.problems())
