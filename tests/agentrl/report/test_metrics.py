import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.report import metrics
from agentrl.report.metrics import MetricsLog, rollout_metrics
from agentrl.run_folder import RunFolder
from agentrl.testing import episode_of, with_members
from agentrl.types import StopReason
from tests.agentrl.report.synthetic_run import Words, make_config, make_group


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run", config=make_config())


def test_lines_read_back_as_logged(folder: RunFolder) -> None:
    with MetricsLog(folder) as log:
        log.log("step", 1, {"a": 1, "b": 0.25})
        log.log("eval", 1, {"eval/avg_at_n": 0.5})
    first, second = metrics.read(folder.metrics)
    assert (first.kind, first.step, first.values) == ("step", 1, {"a": 1.0, "b": 0.25})
    assert (second.kind, second.values) == ("eval", {"eval/avg_at_n": 0.5})


def test_evaluations_are_found_by_set_and_of_two_of_one_version_the_later_counts(folder: RunFolder) -> None:
    with MetricsLog(folder) as log:
        for version, name, value in ((0, "b", 0.1), (0, "a", 0.2), (4, "b", 0.3), (2, "b", 0.4), (2, "b", 0.5)):
            log.log("eval", version, {f"eval/{name}/avg_at_n": value, f"eval/{name}/n": 4})
        log.log("eval", 7, {"eval/avg_at_n": 0.6})
        log.log("step", 7, {"learner/kl": 1})
    found = metrics.held_out_lines(metrics.read(folder.metrics), ["a", "unknown"])
    assert list(found) == ["a", "b", ""]
    assert [(line.step, line.values["eval/avg_at_n"]) for line in found["b"]] == [(0, 0.1), (2, 0.5), (4, 0.3)]
    assert found["b"][0].values == {"eval/avg_at_n": 0.1, "eval/n": 4} and found[""][0].step == 7


def test_a_line_is_readable_before_the_log_is_closed(folder: RunFolder) -> None:
    with MetricsLog(folder) as log:
        log.log("step", 1, {"a": 1})
        assert len(metrics.read(folder.metrics)) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_number_is_refused_by_name_and_nothing_is_written(folder: RunFolder, bad: float) -> None:
    with MetricsLog(folder) as log, pytest.raises(ValueError, match="learner/kl"):
        log.log("step", 1, {"fine": 1.0, "learner/kl": bad})
    assert folder.metrics.read_text() == ""


def test_a_torn_last_line_costs_only_itself(folder: RunFolder) -> None:
    with MetricsLog(folder) as log:
        log.log("step", 1, {"a": 1})
        log.log("step", 2, {"a": 2})
    whole = folder.metrics.read_bytes()
    for cut in range(whole.index(b"\n") + 2, len(whole) - 1):
        folder.metrics.write_bytes(whole[:cut])
        assert [line.step for line in metrics.read(folder.metrics)] == [1]


def test_a_log_opened_after_a_torn_line_does_not_glue_to_it(folder: RunFolder) -> None:
    folder.metrics.write_text('{"kind": "step", "st')
    with MetricsLog(folder) as log:
        log.log("step", 7, {})
    assert [line.step for line in metrics.read(folder.metrics)] == [7]


def test_a_missing_file_reads_as_no_lines(tmp_path: Path) -> None:
    assert metrics.read(tmp_path / "metrics.jsonl") == []


def test_tensorboard_itself_reads_the_events(folder: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    with MetricsLog(folder) as log:
        log.log("step", 3, {"learner/ess_ratio": 0.5})
    (file,) = folder.tensorboard.iterdir()
    points = [
        (event.step, value.tag, value.tensor.float_val[0])
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]
    assert points == [(3, "learner/ess_ratio", 0.5)]


def test_logging_loads_no_torch(folder: RunFolder) -> None:
    code = (
        "import sys; from pathlib import Path; from agentrl.report.metrics import MetricsLog;"
        "from agentrl.run_folder import RunFolder;"
        f"log = MetricsLog(RunFolder(path=Path({str(folder.path)!r}))); log.log('step', 1, {{'a': 1}}); log.close();"
        "assert not {'torch', 'tensorflow', 'vllm', 'deepspeed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_rollout_metrics_by_hand() -> None:
    rng, words = random.Random(0), Words()
    all_right = make_group(words, 0, version=0, skill=1.0, rng=rng, size=2)
    all_wrong = make_group(words, 1, version=0, skill=0.0, rng=rng, size=2)
    infos = ({"tool_calls": 3.0, "tool_errors": 1.0, "sandbox_s": 0.5}, {"tool_calls": 1.0, "sandbox_s": 1.5})
    members = tuple(replace(t, info=info) for t, info in zip(all_right.trajectories, infos, strict=True))
    wrong = tuple(replace(t, info={}, stop_reason=StopReason.TIMEOUT) for t in all_wrong.trajectories)
    first = replace(members[0], rewards={"correct": 1.0, "step": 0.4})  # the only one that was rewarded in a turn
    values = rollout_metrics([with_members(all_right, (first, *members[1:])), with_members(all_wrong, wrong)])
    assert values["rollout/reward_mean"] == values["rollout/reward_correct"] == 0.5
    assert values["rollout/reward_step"] == 0.1
    assert values["rollout/solve_all"] == values["rollout/solve_none"] == 0.5
    assert values["rollout/stop_completed"] == values["rollout/stop_timeout"] == 0.5
    assert sum(values[f"rollout/stop_{reason}"] for reason in StopReason) == 1.0
    assert values["rollout/tool_calls_mean"] == 1.0
    assert values["rollout/tool_success_rate"] == 0.75
    assert values["rollout/sandbox_s_mean"] == 1.0


def test_without_tool_calls_there_is_no_success_rate() -> None:
    group = make_group(Words(), 0, version=0, skill=1.0, rng=random.Random(0), size=1)
    silent = with_members(group, (replace(group.trajectories[0], info={}),))
    assert "rollout/tool_success_rate" not in rollout_metrics([silent])


def test_segments_and_masked_episodes_are_counted_by_episode() -> None:
    group = make_group(Words(), 0, version=0, skill=1.0, rng=random.Random(0), size=2)
    forked, masked = group.trajectories
    halves = tuple(replace(forked, id=f"{forked.id}.{segment}", weight=0.5) for segment in range(2))
    values = rollout_metrics([with_members(group, [episode_of(*halves), replace(masked, weight=0.0)])])
    assert values["rollout/segments_mean"] == 1.5
    assert values["rollout/masked"] == 0.5


def test_no_episodes_give_no_metrics() -> None:
    assert rollout_metrics([]) == {}
