import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from agentrl.report import page as report
from agentrl.report.learning_signal import LearningSignal
from agentrl.report.metrics import MetricsLog
from agentrl.report.page import write_report
from agentrl.run_folder import RunFolder
from agentrl.testing import episode_of, with_members
from agentrl.types import Message, ToolCall, Trajectory
from tests.agentrl.report.synthetic_run import Words, make_config, make_group, make_run

HOSTILE = "</script></pre><script>alert(1)</script><img src=x onerror=alert(2)><!-- {{ 7*7 }} &lt;b&gt;"


class Page(HTMLParser):
    """The elements of a page, and the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.cdata_elem is None:
            self.text += data

    def figures(self) -> list[dict]:
        return json.loads(self.scripts[1])


def page_of(folder: RunFolder) -> Page:
    return Page(write_report(folder).read_text())


def decode_with(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    """The synthetic run's words stand in for the tokenizer of a model folder."""

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(words.decode(token_id) for token_id in token_ids)

    monkeypatch.setattr(report, "_decoder", lambda _path: decode)


def folder_with(tmp_path: Path, *trajectories: Trajectory) -> RunFolder:
    folder = RunFolder.create(tmp_path, "run", config=make_config())
    group = make_group(Words(), 0, version=1, skill=1.0, rng=random.Random(0), size=1)
    folder.write_trajectories(1, [with_members(group, trajectories)])
    return folder


def an_episode(words: Words | None = None) -> Trajectory:
    return make_group(words or Words(), 0, version=1, skill=1.0, rng=random.Random(0), size=1).trajectories[0]


def test_a_finished_run_shows_curves_before_and_after_and_ten_episodes(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, num_steps=12))
    titles = [figure["layout"]["title"]["text"] for figure in page.figures()]
    for title in ("Held-out success", "Reward of finished groups", "Effective sample size", "Gradient norm", "Lag"):
        assert title in titles
    assert sum(tag == "details" and "episode" in (at.get("class") or "") for tag, at in page.elements) == 10
    assert "avg@4 before" in page.text and "avg@4 after" in page.text
    assert "is the bottleneck" in page.text and "of the generated tokens were in useful groups" in page.text
    assert "Held-out success rose from" in page.text and "the 95 % intervals do not overlap" in page.text
    tiles = [at for tag, at in page.elements if tag == "div" and at.get("class") == "tile"]
    assert len(tiles) == 6 and all(at["title"] in page.text for at in tiles)


def test_a_run_that_throws_most_groups_away_says_why_at_the_top(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run", config=make_config())
    signal = LearningSignal(groups=100, useful=10, tokens=1000, useful_tokens=90, unsolved=90, variety=90, nats=900)
    timing = {"run/step_s": 10.0, "wait/learner_for_batch_s": 9.0, "engine/busy_share": 1.0}
    with MetricsLog(folder) as log:
        log.log("step", 1, {**signal.metrics(), **timing})
    text = page_of(folder).text
    assert "10 % of 100 finished groups were useful" in text and "Use easier tasks" in text
    assert "because most of it is thrown away. Only 9 % of the generated tokens were in useful groups" in text


def test_the_curves_carry_the_logged_numbers(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run", config=make_config())
    with MetricsLog(folder) as log:
        log.log("step", 1, {"learner/grad_norm": 0.5})
        log.log("step", 2, {"learner/kl": 1e-9})
        log.log("step", 3, {"learner/grad_norm": 2.5})
    norm, kl = page_of(folder).figures()
    assert (norm["data"][0]["x"], norm["data"][0]["y"]) == ([1, 3], [0.5, 2.5])
    assert kl["data"][0]["y"] == [1e-9]


def test_right_and_wrong_episodes_of_start_and_end_are_mixed(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path, num_steps=12)).text
    for part in ("step 0 ·", "step 12 ·", "reward 1.00", "reward 0.00"):
        assert part in text


def test_one_task_with_many_samples_still_fills_ten_episodes(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run", config=make_config())
    folder.write_trajectories(1, [make_group(Words(), 0, version=1, skill=0.5, rng=random.Random(0), size=16)])
    assert page_of(folder).text.count("policy version") == 10


def test_the_segments_of_an_episode_are_shown_as_one_episode(tmp_path: Path) -> None:
    episode = an_episode()
    folder = RunFolder.create(tmp_path, "run", config=make_config())
    group = make_group(Words(), 0, version=1, skill=1.0, rng=random.Random(0), size=1)
    folder.write_trajectories(1, [with_members(group, [episode_of(episode, replace(episode, id="second"))])])
    page = page_of(folder)
    assert sum(tag == "details" and at.get("class") == "episode" for tag, at in page.elements) == 1
    assert "segment 1 of 2" in page.text and "segment 2 of 2" in page.text
    assert f"{2 * episode.num_action_tokens} tokens" in page.text


def test_the_page_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, num_steps=2))
    assert not [at for _, at in page.elements if "src" in at or not (at.get("href") or "#").startswith("#")]
    policy = next(at["content"] for _, at in page.elements if at.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'nonce-")


def test_a_hostile_episode_is_only_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Words()
    call = ToolCall(id="1", name=HOSTILE, arguments={"code": HOSTILE})
    episode = replace(
        an_episode(words),
        messages=(
            Message(role="assistant", content=HOSTILE, tool_calls=(call,)),
            Message(role="tool", content=HOSTILE),
        ),
    )
    words.ids = {f"{HOSTILE}{i}": i for i in range(len(words.ids))}
    decode_with(words, monkeypatch)
    folder = folder_with(tmp_path, episode)
    with MetricsLog(folder) as log:
        log.log("step", 1, {"learner/kl": 0.1, f"ledger/{HOSTILE}": 1.0})
    page = page_of(folder)
    assert len([tag for tag, _ in page.elements if tag == "script"]) == 3
    assert "img" not in {tag for tag, _ in page.elements}
    assert not [name for _, at in page.elements for name in at if name.startswith("on")]
    assert page.text.count(HOSTILE) >= 4 + episode.num_action_tokens


def test_tokens_show_logprob_version_changes_and_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Words()
    episode = an_episode(words)
    decode_with(words, monkeypatch)
    page = page_of(folder_with(tmp_path, episode))
    classes = [at.get("class") for tag, at in page.elements if tag == "span" and at.get("class") in {"o", "a", "a v"}]
    assert [name != "o" for name in classes] == [mask == 1 for mask in episode.action_mask()]
    versions = [version for version in episode.policy_versions() if version >= 0]
    changes = 1 + sum(a != b for a, b in pairwise(versions))
    assert classes.count("a v") == changes == sum(tag == "sup" for tag, _ in page.elements)
    titles = [at["title"] for tag, at in page.elements if tag == "span" and "title" in at]
    assert titles[0] == f"logprob {episode.turns[0].completion.behavior_logprobs[0]:.3f}, version 1"


def test_the_middle_of_a_very_long_episode_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Words()
    episode = an_episode(words)
    long_turn = replace(episode.turns[0], observation_ids=(0,) * 100_000)
    decode_with(words, monkeypatch)
    page = page_of(folder_with(tmp_path, replace(episode, turns=(long_turn, *episode.turns[1:]))))
    assert "tokens are not shown" in page.text
    assert sum(tag == "span" and at.get("class") == "o" for tag, at in page.elements) < 4500


def test_a_run_that_ended_before_its_first_step_has_a_report(tmp_path: Path) -> None:
    page = page_of(RunFolder.create(tmp_path, "run", config=make_config()))
    assert "No step was finished" in page.text


def test_a_run_cut_off_in_mid_line_without_evaluation_has_a_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path, num_steps=3, with_eval=False)
    with folder.metrics.open("a") as file:
        file.write('{"kind": "step", "step": 4, "val')
    page = page_of(folder)
    assert page.figures()[0]["data"][0]["x"] == [1, 2, 3]
    assert "reward" in page.text and "avg@" not in page.text


def test_a_second_report_replaces_the_first_and_leaves_no_litter(tmp_path: Path) -> None:
    folder = make_run(tmp_path, num_steps=1, with_eval=False)
    write_report(folder)
    folder.report.write_text("old")
    assert write_report(folder).read_text() != "old"
    assert not list(folder.path.glob(".*"))


def test_the_token_view_uses_the_configs_renderer(with_template: Callable[[str | None], str]) -> None:
    folder = with_template("{{ raise_exception('this template cannot be trained with') }}")
    assert report._decoder({"path": folder}) is None
    decode = report._decoder({"path": folder, "renderer": "raw"})
    assert decode is not None and decode([]) == ""
