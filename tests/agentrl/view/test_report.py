"""report.html: one small file with a sample of the run, written whatever state the run is in."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from agentrl.report.learning_signal import LearningSignal
from agentrl.report.metrics import MetricsLog
from agentrl.run_folder import RunFolder
from agentrl.testing import with_members
from agentrl.types import Message
from agentrl.view import bundle
from agentrl.view.bundle import write_report
from tests.agentrl.report.synthetic_run import Words, make_config, make_group, make_run

HOSTILE = "</script></pre><script>alert(1)</script><img src=x onerror=alert(2)><!-- {{ 7*7 }} &lt;b&gt;"


class Page(HTMLParser):
    """The elements of a page, and the documents that it holds."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.documents: dict[str, Any] = {}
        self.size = len(html)
        self.size_of_data = 0
        self._name: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._name = dict(attrs).get("data-doc")

    def handle_data(self, data: str) -> None:
        if self._name is not None and data.strip():
            self.size_of_data += len(data)
            self.documents[self._name] = json.loads(gzip.decompress(base64.b64decode(data)))
            self._name = None

    def summary(self) -> Any:
        return next(document for name, document in self.documents.items() if name.endswith("/summary"))


def page_of(folder: RunFolder) -> Page:
    return Page(write_report(folder).read_text())


def test_a_finished_run_has_its_results_curves_and_episodes_in_two_megabytes(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, num_steps=12))
    said = page.summary()
    titles = [chart["title"] for chart in said["charts"]]
    for title in ("Reward of finished groups", "Effective sample size", "Gradient norm", "Lag"):
        assert title in titles
    assert "Held-out success rose from" in said["headline"] and "the 95 % intervals do not overlap" in said["headline"]
    assert "is the bottleneck" in said["waits"] and "of the generated tokens were in useful groups" in said["waits"]
    assert said["held_out"][0]["columns"]["step"] == [0, 12]
    groups = [name for name in page.documents if "/group/" in name]
    assert len(groups) == 2 * 48 + 12 * 8
    assert page.size - page.size_of_data < 2_000_000


def test_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, num_steps=2))
    assert not [at for _, at in page.elements if "src" in at or "href" in at]
    policy = next(at["content"] for _, at in page.elements if at.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'nonce-")
    assert "connect-src 'none'" in policy


def test_of_a_large_run_it_holds_a_sample_and_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    folder = make_run(tmp_path, num_steps=9, with_eval=False)
    monkeypatch.setattr(bundle, "MAX_REPORT_FILES", 3)
    monkeypatch.setattr(bundle, "MAX_SAMPLE_BYTES", 20_000)
    page = page_of(folder)
    (episodes,) = (document for name, document in page.documents.items() if name.endswith("/episodes"))
    assert episodes["sampled"] is True and set(episodes["columns"]["step"]) == {1, 5, 9}
    groups = [name for name in page.documents if "/group/" in name]
    assert 0 < len(groups) < 3 * 8
    assert page.summary()["steps"]["columns"]["step"] == list(range(1, 10))


def test_a_run_that_throws_most_groups_away_says_why(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run", config=make_config())
    signal = LearningSignal(groups=100, useful=10, tokens=1000, useful_tokens=90, unsolved=90, variety=90, nats=900)
    timing = {"run/step_s": 10.0, "wait/learner_for_batch_s": 9.0, "engine/busy_share": 1.0}
    with MetricsLog(folder) as log:
        log.log("step", 1, {**signal.metrics(), **timing})
    said = page_of(folder).summary()
    assert "10 % of 100 finished groups were useful" in said["diagnosis"] and "Use easier tasks" in said["diagnosis"]
    assert "because most of it is thrown away. Only 9 % of the generated tokens" in said["waits"]


def test_a_hostile_episode_cannot_leave_its_document(tmp_path: Path) -> None:
    group = make_group(Words(), 0, version=1, skill=1.0, rng=random.Random(0), size=1)
    episode = replace(group.trajectories[0], messages=(Message(role="assistant", content=HOSTILE),))
    folder = RunFolder.create(tmp_path, "run", config=make_config())
    folder.write_trajectories(1, [with_members(group, [episode])])
    with MetricsLog(folder) as log:
        log.log("step", 1, {"learner/kl": 0.1, f"ledger/{HOSTILE}": 1.0})
    text = write_report(folder).read_text()
    assert "alert(1)" not in text and "<img" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    (document,) = (one for name, one in Page(text).documents.items() if "/group/" in name)
    assert document["episodes"][0]["segments"][0]["messages"][0]["content"] == HOSTILE


def test_runs_that_did_not_get_far_have_a_report(tmp_path: Path) -> None:
    never = page_of(RunFolder.create(tmp_path, "never", config=make_config())).summary()
    assert never["steps"]["count"] == 0 and never["charts"] == []
    cut = make_run(tmp_path, num_steps=3, with_eval=False)
    with cut.metrics.open("a") as file:
        file.write('{"kind": "step", "step": 4, "val')
    said = page_of(cut).summary()
    assert said["steps"]["columns"]["step"] == [1, 2, 3] and said["held_out"] == []
    assert any("half a line" in problem for problem in said["problems"])


def test_a_second_report_replaces_the_first_and_leaves_no_litter(tmp_path: Path) -> None:
    folder = make_run(tmp_path, num_steps=1, with_eval=False)
    write_report(folder)
    folder.report.write_text("old")
    assert write_report(folder).read_text() != "old"
    assert not list(folder.path.glob(".*.tmp"))
