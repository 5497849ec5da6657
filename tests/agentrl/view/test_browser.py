"""The page in a real browser: every view, filter, key and link, live, from a folder, in one file, with hostile texts.

`make test-view` runs this in an environment that has Playwright, with the machine's Chromium.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from agentrl.run_folder import RunFolder
from agentrl.types import Message, StopReason, ToolCall
from tests.agentrl.view.test_why import annotate
from tests.test_imports import ROOT

playwright = pytest.importorskip("playwright.sync_api", reason="`make test-view` has Playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="`make test-view` has axe")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

EVIL = (
    "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'><b>bold</b>"
    " \u202ereversed\u202c zero\u200bwidth \x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x07link\x00 &lt;"
)
VIEWS = ("overview", "episodes", "timeline", "ledger", "settings")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, trained: RunFolder, tokenizer_dir: Path) -> RunFolder:
    """Step 4 has an episode with hostile texts and one line of ten million signs."""
    folder = tmp_path_factory.mktemp("browser") / "t"
    shutil.copytree(trained.path, folder)
    run = RunFolder.open(folder)
    (run.checkpoints / "final").mkdir()
    shutil.copy(tokenizer_dir / "tokenizer.json", run.checkpoints / "final")
    first, *rest = run.read_trajectories(4)
    call = ToolCall(id="c", name="python<i>", arguments={"code": f"print({EVIL!r})", "n": [1, EVIL]})
    messages = (
        Message(role="user", content=EVIL),
        Message(role="assistant", content=f"<think>{EVIL}</think>answer {EVIL}", tool_calls=(call,)),
        Message(role="tool", content=f"Traceback (most recent call last):\n{EVIL}", tool_call_id="c"),
        Message(role="assistant", content="x" * 10_000_000),
    )
    (episode, *others) = first.episodes
    segments = (replace(episode.segments[0], messages=messages, stop_reason=StopReason.MAX_TURNS),)
    hostile = replace(
        first,
        task=replace(first.task, prompt=EVIL, answer=EVIL),
        episodes=(replace(episode, segments=segments), *others),
    )
    run.write_trajectories(4, [hostile, *rest])
    return run


@pytest.fixture(scope="module")
def url(run: RunFolder) -> Iterator[str]:
    command = [sys.executable, "-m", "agentrl", "view", str(run.path), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[0]
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tool:
        found = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails its test when a script fails, something is refused by the policy, or another host is asked."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.set_default_timeout(60_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: wrong.append(request.url) if "evil" in request.url else None)
    yield page
    assert page.evaluate("window.hit") is None
    context.close()
    assert wrong == []


def hostile(run: RunFolder) -> tuple[int, str]:
    (group, *_) = run.read_trajectories(4)
    return group.group_id, group.episodes[0].id


def expect(locator: Any) -> Any:
    return playwright.expect(locator)


def open_at(page: Any, url: str, place: str) -> None:
    page.goto("about:blank")
    page.goto(f"{url}#/t/{place}")
    page.locator("main h1").first.wait_for()


def test_the_overview_has_results_curves_and_the_way_to_the_episodes(page: Any, url: str) -> None:
    page.goto(url)
    expect(page.locator("main h1")).to_have_text("t")
    expect(page.locator(".headline")).to_contain_text("Held-out success stayed at 0.500")
    expect(page.locator(".tile").first).to_contain_text("0.5")
    curve = page.locator(".chart", has_text="Reward").locator(".u-over").first
    curve.wait_for()
    page.locator("input[type=range]").fill("0.5")
    expect(page.locator(".chart", has_text="Reward").first).to_contain_text("(raw)")
    box = curve.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.66, box["y"] + 20)
    expect(page.locator(".query")).to_have_value("kind=train step=3")
    expect(page.locator(".count")).to_contain_text("8 of ")
    open_at(page, url, "overview")
    page.get_by_label("Find a metric").fill("run/step_s")
    expect(page.locator(".chart", has_text="run/step_s")).to_have_count(1)


def test_episodes_are_filtered_sorted_and_chosen_by_column(page: Any, url: str) -> None:
    open_at(page, url, "episodes")
    status = page.locator(".count")
    expect(status).to_contain_text("44 of 44 episodes")
    for line, count in (
        ("reward<1 kind=train", 16),
        ("kind=eval", 12),
        ("stop_reason=max_turns", 1),
        ("step>=2 step<3 kind=train", 8),
        ("lag=null", 12),
        ('"say yes"', 40),
        ("no-such-word", 0),
    ):
        page.locator(".query").fill(line)
        expect(status).to_contain_text(f"{count} of 44")
    expect(page.locator(".empty")).to_be_visible()
    page.locator(".query").fill("nothing=1")
    expect(status).to_contain_text("no column nothing")
    page.locator(".query").fill("")
    page.get_by_role("button", name="train 32").click()
    expect(page.locator(".query")).to_have_value("kind=train")
    page.get_by_role("button", name="reward 1: 16 episodes").click()
    expect(status).to_contain_text("16 of 44 episodes, mean reward 1")
    page.get_by_role("button", name="step", exact=True).click()
    expect(page.locator(".rows .row").first.locator("span").first).to_have_text("4")
    page.locator(".menu summary").click()
    page.get_by_label("group_id").check()
    expect(page.get_by_role("columnheader", name="group")).to_be_visible()
    assert "sort=-step" in page.url and "group_id" in page.url
    page.reload()
    expect(page.get_by_role("columnheader", name="group")).to_be_visible()
    expect(status).to_contain_text("16 of 44")


def test_the_keyboard_is_enough(page: Any, url: str) -> None:
    open_at(page, url, "episodes")
    page.keyboard.press("/")
    page.keyboard.type("kind=train step=2")
    page.keyboard.press("Escape")
    expect(page.locator(".count")).to_contain_text("8 of 44")
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("k")
    second = page.locator(".rows .row").nth(1)
    expect(second).to_have_class(re.compile("at"))
    page.keyboard.press("Enter")
    expect(page.locator(".crumbs")).to_contain_text("2 of 8")
    page.keyboard.press("j")
    expect(page.locator(".crumbs")).to_contain_text("3 of 8")
    name = page.locator("main h1").inner_text()
    page.keyboard.press("t")
    expect(page.locator(".tokens")).to_be_visible()
    expect(page.locator("main h1")).to_have_text(name)
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".crumbs")).to_contain_text("2 of 8")
    page.keyboard.press("g")
    expect(page.locator("main h1")).to_contain_text("Group")
    page.go_back()
    expect(page.locator(".tokens")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".query")).to_have_value("kind=train step=2")


def test_a_group_shows_who_was_better_and_where_two_part(page: Any, url: str, run: RunFolder) -> None:
    group = run.read_trajectories(2)[0]
    open_at(page, url, f"group/train/2/{group.group_id}")
    expect(page.locator(".members tbody tr")).to_have_count(4)
    expect(page.locator(".push .up")).to_have_count(2)
    expect(page.locator(".same summary")).to_have_text("The first message is the same")
    expect(page.locator(".pair-row.first")).to_contain_text("first difference")
    same = [place for place, reward in enumerate(group.episode_rewards) if reward == 1][1]
    page.get_by_label(f"{group.episodes[same].id} on the right").check()
    expect(page.locator(".same summary")).to_have_text("They are the same")
    assert f"b={same}" in page.url


def test_a_group_shows_why_the_learner_pushed_its_episodes(page: Any, url: str, run: RunFolder) -> None:
    group = annotate(run, 1)
    open_at(page, url, f"group/train/1/{group.group_id}")
    expect(page.locator("main")).to_contain_text("subtracted the baseline 0.75 (opob_safe), 0.25 above the mean")
    expect(page.get_by_role("columnheader", name="share in b*")).to_be_visible()
    good = group.episode_rewards.index(1.0)
    row = page.locator(".members tbody tr").nth(good)
    expect(row).to_contain_text("50 %")
    expect(row.locator(".push")).to_have_attribute("aria-label", "up 0.75")
    open_at(page, url, f"episode/train/1/{group.group_id}/{group.episodes[good].id}?show=tokens")
    for colour in ("log ratio", "weight", "advantage", "entropy"):
        page.get_by_role("button", name=colour, exact=True).click()
        expect(page.get_by_role("button", name=colour, exact=True)).to_have_attribute("aria-pressed", "true")
    page.locator("[data-at].sampled").first.hover()
    expect(page.locator(".token-facts")).to_contain_text("log ratio 0.1 weight 1.5 advantage 0.25")


def test_tokens_are_those_of_the_file(page: Any, url: str, run: RunFolder) -> None:
    group = run.read_trajectories(2)[0]
    trajectory = group.trajectories[0]
    open_at(page, url, f"episode/train/2/{group.group_id}/{group.episodes[0].id}?show=tokens")
    expect(page.locator("[data-at]")).to_have_count(len(trajectory.token_ids()))
    expect(page.locator("[data-at].sampled")).to_have_count(trajectory.num_action_tokens)
    expect(page.locator("[data-at].special").first).to_have_text("<|im_start|>")
    expect(page.locator(".tokens")).to_contain_text("Say yes.")
    page.locator("[data-at].sampled").first.hover()
    expect(page.locator(".token-facts")).to_contain_text("probability")
    for colour in ("version", "mask", "turn", "logprob"):
        page.get_by_role("button", name=colour, exact=True).click()
        expect(page.get_by_role("button", name=colour, exact=True)).to_have_attribute("aria-pressed", "true")


def test_hostile_text_is_text(page: Any, url: str, run: RunFolder) -> None:
    group_id, episode_id = hostile(run)
    open_at(page, url, f"episode/train/4/{group_id}/{episode_id}")
    user = page.locator(".message.user pre")
    expect(user).to_contain_text("<script>window.hit = 1</script><img src=x onerror='window.hit = 1'><b>bold</b>")
    expect(user).to_contain_text("U+202Ereversed")
    expect(user).to_contain_text("U+200B")
    assert page.locator(".message b:has-text('bold'), .message script, .message img, .message a").count() == 0
    expect(page.locator(".message.tool .ansi-c1")).to_have_text("red")
    expect(page.locator(".message.tool")).to_contain_text("failed")
    page.locator(".thought summary").first.click()
    expect(page.locator(".thought pre").first).to_contain_text("<script>")
    more = page.locator(".message .more").last
    expect(more).to_contain_text("9,988,000 more characters")
    assert len(page.locator(".message.assistant").last.inner_text()) < 20_000
    for place in (f"group/train/4/{group_id}", "episodes?q=stop_reason%3Dmax_turns"):
        open_at(page, url, place)
        page.wait_for_timeout(100)


def test_the_ledger_balances_and_leads_to_its_groups(page: Any, url: str) -> None:
    open_at(page, url, "ledger")
    band = page.get_by_role("button", name=re.compile("trained: 8 groups"))
    band.focus()
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(8)
    page.locator("tbody a").first.click()
    expect(page.locator("main h1")).to_contain_text("Group")


def test_the_timeline_has_a_lane_for_each_episode(page: Any, url: str, run: RunFolder) -> None:
    open_at(page, url, "timeline")
    expect(page.locator(".bar [role=status]")).to_contain_text("44 episodes")
    expect(page.locator(".tile").first).to_contain_text("the learner waited for a batch")
    page.get_by_text("the same as a table").click()
    expect(page.locator("tbody tr")).to_have_count(44)
    lanes = page.locator(".lanes")
    lanes.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".timeline-facts a")).to_have_count(1)
    chosen = page.locator(".timeline-facts a").inner_text()
    page.keyboard.press("+")
    page.wait_for_url("**from=**")
    page.get_by_role("button", name="all", exact=True).click()
    expect(page.locator(".bar [role=status]")).to_contain_text("44 episodes")
    with page.expect_download() as download:
        page.get_by_role("link", name="trace for Perfetto").click()
    assert json.loads(Path(download.value.path()).read_text())["traceEvents"]
    lanes.focus()
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text(chosen)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_is_wrong_for_a_screen_reader(page: Any, url: str, run: RunFolder, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    group_id, episode_id = hostile(run)
    where = f"train/4/{group_id}"
    for place in (
        *VIEWS,
        f"group/{where}",
        f"episode/{where}/{episode_id}",
        f"episode/{where}/{episode_id}?show=tokens",
    ):
        open_at(page, url, place)
        page.locator("main > *").nth(1).wait_for()
        found = axe.Axe().run(page).response["violations"]
        serious = [
            (one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in ("serious", "critical")
        ]
        assert serious == [], place


def test_dark_and_light_can_be_chosen(page: Any, url: str) -> None:
    page.emulate_media(color_scheme="light")
    open_at(page, url, "overview")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.get_by_role("button", name="Colours: auto").click()
    page.get_by_role("button", name="Colours: light").click()
    page.locator("html[data-theme=dark]").wait_for()
    dark = page.evaluate(colour)
    assert light != dark
    page.reload()
    page.locator("main h1").wait_for()
    assert page.evaluate(colour) == dark


def test_what_the_run_writes_appears(page: Any, url: str, run: RunFolder) -> None:
    open_at(page, url, "episodes?q=step%3D9")
    expect(page.locator(".count")).to_contain_text("0 of 44")
    new = run.write_trajectories(9, run.read_trajectories(1))
    try:
        expect(page.locator(".count")).to_contain_text("8 of 52")
    finally:
        new.unlink()
    expect(page.locator(".count")).to_contain_text("0 of 44")


def test_what_cannot_be_read_is_said_on_the_page(page: Any, url: str, run: RunFolder) -> None:
    broken = run.trajectories / "train_000008.jsonl.gz"
    broken.write_bytes(b"no gzip")
    try:
        open_at(page, url, "overview")
        expect(page.locator(".warning[role=status]")).to_contain_text("train_000008.jsonl.gz is damaged")
    finally:
        broken.unlink()


@pytest.mark.parametrize("target", ["folder", "file.html", "report.html"])
def test_links_work_in_a_copy_without_a_server(page: Any, run: RunFolder, tmp_path: Path, target: str) -> None:
    copy = tmp_path / target
    what = ["report", str(run.path)] if target == "report.html" else ["view", str(run.path), "--bundle", str(copy)]
    subprocess.run(
        [sys.executable, "-m", "agentrl", *what],
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    if target == "report.html":
        copy = run.report.rename(copy)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    address = (copy if copy.is_file() else copy / "index.html").as_uri()
    group = run.read_trajectories(2)[0]
    open_at(page, address, f"episodes?q={quote('reward<1 kind=train')}")
    expect(page.locator(".count")).to_contain_text("16 of 44")
    open_at(page, address, f"group/train/2/{group.group_id}")
    expect(page.locator(".members tbody tr")).to_have_count(4)
    open_at(page, address, "overview")
    expect(page.locator(".u-over").first).to_be_visible()
    assert {url.partition(":")[0] for url in asked} <= {"file", "blob", "data"}
    if copy.is_file():
        assert {url.partition("#")[0] for url in asked if url.startswith("file")} == {address}


def test_an_address_that_leads_nowhere_says_so(page: Any, url: str) -> None:
    for place, said in (("#/other/overview", 'no run "other"'), ("#/t/nowhere", 'no view "nowhere"')):
        page.goto("about:blank")
        page.goto(url + place)
        expect(page.locator(".warning").first).to_contain_text(said)


def test_two_runs_are_compared(page: Any, run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder(path=tmp_path / "other")
    shutil.copytree(run.path, other.path)
    other.config.write_text(other.config.read_text().replace('"max_lag": 1', '"max_lag": 3'))
    better = [
        replace(
            group,
            episodes=tuple(replace(one, segments=(replace(one.segments[0], reward=1.0),)) for one in group.episodes),
        )
        for group in other.read_trajectories(4, kind="eval")
    ]
    other.write_trajectories(4, better, kind="eval")
    command = [sys.executable, "-m", "agentrl", "view", str(run.path), str(other.path), "--bundle", str(tmp_path / "b")]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120)
    page.goto((tmp_path / "b/index.html").as_uri())
    expect(page.locator("main")).to_contain_text("Over 2 tasks that both were measured on at their ends")
    expect(page.locator("main")).to_contain_text("changed by +0.5, 95 % interval [+0.5, +0.5]")
    expect(page.locator("main")).to_contain_text("2 better, 0 worse, 0 the same")
    expect(page.locator(".differences tbody tr")).to_have_text(["rollout.max_lag13"])
    expect(page.locator(".chart", has_text="Held out").locator(".u-legend")).to_contain_text("other")
