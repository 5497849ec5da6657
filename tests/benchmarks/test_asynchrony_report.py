"""The report of the asynchronous benchmark, on made-up records whose numbers are worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import DataError
from benchmarks.asynchrony import pictures, records, report, tables
from benchmarks.asynchrony.arms import ARMS
from benchmarks.asynchrony.records import Waits
from benchmarks.asynchrony.tables import Study

SIGMA_1 = Waits(4.0, 1.0)
STEP_S = {"S1": 8.0, "S4r": 10.0, "A2": 5.0, "A4": 4.0}
"""Seconds a step of seed 0; seed 1 is a quarter slower."""


def record(arm: str, seed: int, *, kind: str = "score", num_steps: int = 8, **changes: Any) -> dict[str, Any]:
    """A run that rises by 0.1 every two steps from 0.5, so that it reaches 0.8 at version 6."""
    seconds = STEP_S[arm] * (1.25 if seed else 1.0)
    steps = [
        {
            "version": version,
            "at_s": seconds * version,
            "learner_step_s": 1.0,
            "publish_s": 0.0,
            "lag_mean": 0.5,
            "lag_max": 1.0,
            "groups_trained": 8 * version,
            "groups_equal": 2 * version if ARMS[arm].replaces else 0,
            "groups_stale": 0,
            "stale_tokens_mean": 0.0,
            "generated": 1000 * version,
            "engine_busy_s": 2.0 * version,
        }
        for version in range(1, num_steps + 1)
    ]
    scores = [{"version": v, "avg": 0.5 + 0.05 * v, "episodes": 256} for v in range(2, num_steps + 1, 2)]
    return {
        "arm": arm,
        "sigma": 1.0,
        "mean_wait_s": 4.0,
        "seed": seed,
        "kind": kind,
        "real_sleep": False,
        "header": "- date: today\n- commit: abc\n- machine: 2 cores; load when it began 0.1\n",
        "load": 0.1,
        "steps": steps,
        "scores": scores if kind == "score" else [],
        "core_s": {"engine": 8.0, "learner": 8.0, "rest": 8.0, "others": 99.0},
        "finished_waits_s": 4.0,
        "trained_waits_s": 3.0,
        "trained_tokens_mean": 20.0,
        "trained_tokens": 6400,
        **({} if ARMS[arm].replaces else {"trained_equal": 16}),
        **changes,
    }


def runs() -> list[dict[str, Any]]:
    return [record(arm, seed) for arm in ("S1", "S4r", "A2", "A4") for seed in (0, 1)]


def cells(text: str) -> dict[str, list[str]]:
    """Rows of Markdown tables by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return {row[0]: row[1:] for row in rows}


def test_the_crossing_is_interpolated_and_infinite_where_there_is_none() -> None:
    points = [(0.0, 0, 0.5), (10.0, 2, 0.7), (20.0, 4, 0.9)]
    assert records.crossing_s(points) == pytest.approx(15.0)
    assert records.crossing_s(points, target=0.95) == math.inf
    assert records.score_at(points, 5.0) == pytest.approx(0.6)
    assert records.score_at(points, 3, axis=1) == pytest.approx(0.8)
    assert records.score_at(points, 21.0) is None


def test_the_ratio_is_to_the_best_synchronous_arm_of_each_resample() -> None:
    values = {"S1": {0: 10.0, 1: 30.0}, "S4r": {0: 20.0, 1: 21.0}, "A4": {0: 5.0, 1: 10.0}}
    found = records.ratio(values, "A4")
    assert found is not None and found.num_seeds == 2
    # Means: S1 20, S4r 20.5, A4 7.5. Seed 0 twice: S1 10 / 5; seed 1 twice: S4r 21 / 10.
    assert found.value == pytest.approx(20 / 7.5)
    assert (found.low, found.high) == pytest.approx((2.0, 20 / 7.5))
    assert records.best_synchronous(values) == "S1"


def test_a_run_that_did_not_reach_the_score_has_no_ratio_and_is_no_best_arm() -> None:
    values = {
        "S1": {0: math.inf, 1: 1.0},
        "S4r": {0: 20.0, 1: 20.0},
        "A4": {0: 5.0, 1: 5.0},
        "A2": {0: math.inf, 1: 1.0},
    }
    assert records.best_synchronous(values) == "S4r"
    assert records.ratio(values, "A2") is None
    found = records.ratio(values, "A4")
    assert found is not None and found.value == 4.0
    assert records.ratio({"A4": {0: 5.0}}, "A4") is None and records.ratio({**values, "A4": {7: 1.0}}, "A4") is None


def test_many_seeds_are_drawn_the_same_each_time() -> None:
    first, second = (records.mean([float(value) for value in range(9)]) for _ in range(2))
    assert first == second and first is not None
    assert first.value == 4.0 and 2.0 < first.low < 3.0 < 5.0 < first.high < 6.0


def test_the_tables_have_the_numbers_of_the_records() -> None:
    study = Study(runs=runs(), start_score=0.5)
    assert study.to_target(SIGMA_1)["A4"] == pytest.approx({0: 24.0, 1: 30.0})
    assert cells(tables.headline(study))["sigma 1"][0] == "S1, 54 (48 to 60) s"
    assert cells(tables.headline(study))["sigma 1"][3] == "2.00 (2.00 to 2.00)"  # A4: paired, so without spread
    of_arm = cells(tables.arms(study, SIGMA_1))
    assert of_arm["A4"][:5] == ["2", "2.00 (2.00 to 2.00)", "27 (24 to 30)", "2 of 2", "800"]
    # 800 steps of 8 useful groups. In S1 16 of 64 trained groups are useless, so a useful step takes 4 / 3 as long.
    assert of_arm["A4"][5:7] == ["6400", "2.50 (2.50 to 2.50)"]
    assert of_arm["S1"][5:7] == ["2400", "0.94 (0.94 to 0.94)"]
    assert of_arm["A4"][7:] == ["0.90", "0.80"] and float(of_arm["S4r"][8]) < 0.66
    of_arm = cells(tables.waste(study, SIGMA_1))
    assert of_arm["A4"][:6] == ["22 %", "45 %", "3.00", "1000", "80 %", "20 %"]
    assert cells(tables.selection(study, SIGMA_1))["A4"] == ["4.00", "3.00", "0.75", "20.0", "-"]


def test_predictions_stand_beside_what_was_measured() -> None:
    predicted = [
        {
            "arm": arm,
            "sigma": 1.0,
            "mean_wait_s": 4.0,
            "formula_step_s": None if arm == "S4r" else 3.0,
            "at_s": [seconds * version for version in range(1, 33)],
            "to_target_s": [6 * seconds, 6 * seconds],
        }
        for arm, seconds in (("S4r", 9.0), ("A4", 3.0))
    ]
    study = Study(runs=runs(), predictions={"cells": predicted}, start_score=0.5)
    of_arm = cells(tables.predicted(study, SIGMA_1))
    assert set(of_arm) == {"arm", "S4r", "A4"}
    assert of_arm["A4"] == ["3.00", "3.00", "4.50", "1.50", "18", "27 (24 to 30)", "3.00", "2.00 (2.00 to 2.00)"]
    assert of_arm["S4r"][0] == "-"
    only_predicted = cells(tables.predicted(Study(runs=[], predictions={"cells": predicted}), SIGMA_1))
    assert only_predicted["A4"] == ["3.00", "3.00", "-", "-", "18", "-", "3.00", "-"]


def test_the_pages_are_filled_and_can_be_filled_again(tmp_path: Path) -> None:
    for name in report.PAGES:
        (tmp_path / name).write_text(
            "# By hand\n\n<!-- asynchrony headline -->\nold\n<!-- end of asynchrony headline -->\n"
        )
    page = tmp_path / report.PAGES[0]
    report.main(tmp_path, tmp_path)
    assert page.read_text().count("Not measured yet") == 1 and not list(tmp_path.glob("*.svg"))

    slept = record("A4", 0, kind="speed", real_sleep=True)
    slept["steps"] = [{**step, "at_s": 1.1 * step["at_s"]} for step in slept["steps"]]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*runs(), slept]))
    (tmp_path / "calibration.json").write_text(json.dumps({"start_score": 0.5}))
    report.main(tmp_path, tmp_path)
    first = page.read_text()
    assert first.startswith("# By hand\n") and "A4 reaches 0.8 **2.00 (2.00 to 2.00) times as fast**" in first
    report.main(tmp_path, tmp_path)
    assert page.read_text() == first
    assert all("</svg>" in (tmp_path / f"asynchrony-{name}.svg").read_text() for name in ("speedup", "scores"))

    found = report.parts(report.study_of(tmp_path), tmp_path)
    assert "A4 reaches a held-out score of 0.8 **2.00 (2.00 to 2.00) times as fast** as S1" in found["front"]
    assert "below the goal of 2.5" in found["front"]
    assert cells(found["clock"])["A4"][-1] == "1.10"
    assert "S1r (0, 1, 2, 3)" in found["missing"] and "A4 (2, 3)" in found["missing"]
    assert cells(found["arms"])["A4"][0] == "2" and "commit" not in found["picture speedup"]
    with pytest.raises(KeyError, match="nobody makes this"):
        report.filled("<!-- asynchrony nobody makes this -->\n<!-- end of asynchrony nobody makes this -->\n", found)


def test_the_first_batches_of_an_asynchronous_arm_are_no_pace_that_it_keeps() -> None:
    """A4's first five batches are there at once after 20 s; then a step takes 4 s. S1 has no such batches."""
    at_s = [20.0, 20.5, 21.0, 21.5, 22.0, 26.0, 30.0, 34.0]
    changed = record("A4", 0)
    changed["steps"] = [{**step, "at_s": when} for step, when in zip(changed["steps"], at_s, strict=True)]
    assert records.step_s(changed) == 4.0
    assert records.window_s(at_s, 8, arm="S1") == pytest.approx((34 - 20.5) / 6)
    with pytest.raises(DataError, match="6 steps, and its first 6"):
        records.window_s(at_s, 6, arm="A4")


def test_a_synchronous_arm_that_may_be_better_than_the_best_one_is_named() -> None:
    """S1 needs 54 s on average. S4r ended without the target, once before 54 s and once after."""
    short = [record("S4r", seed, num_steps=4) for seed in (0, 1)]
    long = [record("S4r", seed, scores=[{"version": 8, "avg": 0.7, "episodes": 256}]) for seed in (0, 1)]
    others = [record(arm, seed) for arm in ("S1", "A4") for seed in (0, 1)]
    unmeasured = ["S1r", "S2", "S2r", "S3", "S3r", "S4"]
    assert Study(runs=[*others, *short], start_score=0.5).open_rivals(SIGMA_1) == [*unmeasured, "S4r"]
    assert Study(runs=[*others, *long], start_score=0.5).open_rivals(SIGMA_1) == unmeasured
    assert "Not known, for want of runs: whether S1r, S2" in report.front(Study(runs=others, start_score=0.5))


def test_a_prediction_that_misses_the_target_in_a_seed_has_no_mean_time() -> None:
    assert tables.target_s({"to_target_s": [10.0, 20.0]}) == 15.0
    assert tables.target_s({"to_target_s": [10.0, None]}) is None


def test_without_scores_useful_groups_are_compared(tmp_path: Path) -> None:
    """S4r makes eight useful groups in 10 s, A4 in 4 s."""
    study = Study(runs=[{**one, "kind": "speed", "scores": []} for one in runs()])
    told = "- sigma 1: A4 makes useful groups **2.50 (2.50 to 2.50) times as fast** as the best synchronous arm, S4r"
    assert report.summary(study) == [f"{told} (2 paired seeds; not measured until the score)."]
    assert report.front(study) == ""
    cells = [
        {"arm": arm, "sigma": 1.0, "mean_wait_s": 4.0, "step_s": step_s, "useful_a_step": useful}
        for arm, step_s, useful in (("S1", 9.0, 6.0), ("S4r", 14.0, 8.0), ("A4", 3.0, 8.0))  # 12, 14 and 3 s
    ]
    assert "predicted 4.00;" in report.summary(Study(runs=study.runs, predictions={"cells": cells}))[0]
    picture = pictures.speedup(study, tmp_path / "speedup.svg")
    assert picture is not None and "hollow: useful groups an hour" in picture.read_text()


def test_partial_data_leave_dashes() -> None:
    study = Study(runs=[record("A4", 0), record("S1", 1, kind="speed")])
    assert tables.headline(study) == ""
    assert cells(tables.arms(study, SIGMA_1))["S1"][:4] == ["1", "-", "-", "-"]
    assert cells(tables.arms(study, SIGMA_1))["A4"][1] == "-"


def test_the_committed_page_lists_the_arms_as_they_are(tmp_path: Path) -> None:
    page = (report.DOCS / "results-asynchrony.md").read_text()
    assert report.parts(Study(runs=[]), tmp_path)["list of arms"] in page
