"""The measurement of the first hour reads what a run leaves behind, and the tutorial's files stand on its page."""

from __future__ import annotations

from pathlib import Path

from agentrl.report.metrics import MetricsLine
from benchmarks import first_hour

OUTPUT = """\
starting the sandbox: 1.6 s
warm start: learning from demonstrations: 3976 of 6400
warm start: learning from demonstrations: 28.9 s
starting the engine (vLLM): 33.9 s
held out, version 0: avg@4 0.200 [0.161, 0.385], pass@4 0.375 [0.250, 0.521]
"""


def test_a_run_is_read_from_its_metrics_and_its_output() -> None:
    step = {"ledger/trained": 24.0, "ledger/dropped_zero_variance": 8.0}
    lines = [
        MetricsLine(kind="eval", step=0, time_s=0.0, values={"eval/avg_at_n": 0.2, "eval/pass_at_n": 0.5}),
        *(
            MetricsLine(kind="step", step=i + 1, time_s=1.0, values={**step, "rollout/reward_mean": 0.1 * i})
            for i in range(6)
        ),
        MetricsLine(kind="eval", step=6, time_s=2.0, values={"eval/avg_at_n": 0.9, "eval/pass_at_n": 1.0}),
        MetricsLine(kind="event", step=6, time_s=2.0, values={"run/train_s": 90.0}),
    ]
    found = first_hour._first_run("tutorial", 1, ["train.steps=6"], "- commit: abc\n", lines, OUTPUT, 3.0)
    assert (found.before, found.after, found.steps, found.train_minutes) == (0.2, 0.9, 6, 1.5)
    assert found.curve == (0.2, 0.5)
    assert found.useful_share == 0.75
    assert found.phases_s == {
        "starting the sandbox": 1.6,
        "warm start: learning from demonstrations": 28.9,
        "starting the engine (vLLM)": 33.9,
    }
    text = first_hour.report([found])
    assert "| 1, with train.steps=6 | 0.200 | 0.900 | +0.700 | 0.500 | 1.000 | 6 | 75% of 32 |" in text
    assert "- commit: abc" in text


def test_the_page_has_one_environment_and_one_config(tmp_path: Path) -> None:
    first_hour.write_tutorial(tmp_path)
    assert "class Library(ToolEnv)" in (tmp_path / "library.py").read_text()
    assert "target: library.py:Library" in (tmp_path / "library.yaml").read_text()
