"""The page's server and bundle: what they answer, to whom, and that the built page is the one of the sources."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.errors import ConfigError
from agentrl.run_folder import RunFolder
from agentrl.supervision.serving import serving
from agentrl.view import shell
from agentrl.view.bundle import file_name, write_bundle, write_one_file
from agentrl.view.documents import Documents
from agentrl.view.run_reader import RunReader
from agentrl.view.server import create_app
from tests.test_imports import ROOT


@asynccontextmanager
async def client(run: RunFolder, *, token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    pages = create_app(Documents([RunReader(run)]), token=token, look_every_s=0.01)
    async with (
        serving(pages, host="127.0.0.1", port=0) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield http


async def test_documents_have_what_the_run_has(run: RunFolder) -> None:
    async with client(run) as http:

        async def get(name: str) -> Any:
            return (await http.get(f"/doc/{name}")).raise_for_status().json()

        ((one,), summary) = (await get("runs"))["runs"], await get("t/summary")
        assert one["key"] == "t" and summary["row"]["steps"] == 4
        (held_out,) = summary["held_out"]
        assert summary["steps"]["columns"]["step"] == [1, 2, 3, 4] and held_out["columns"]["step"] == [0, 2, 4]
        assert summary["charts"][0]["curves"] == {"reward": "rollout/reward_mean"}
        assert summary["ledger"]["trained"] == 8 and summary["headline"] == "Held-out success stayed at 0.500."
        episodes = await get("t/episodes")
        assert episodes["count"] == len(episodes["columns"]["reward"]) == 4 * 8 + 3 * 4
        place = run.read_trajectories(1)[0]
        group = await get(f"t/group/train/1/{place.group_id}")
        assert [one["row"]["reward"] for one in group["episodes"]] == place.episode_rewards
        tokens = group["episodes"][2]["segments"][0]["tokens"]
        assert tokens["token_ids"] == place.trajectories[2].token_ids()
        assert (await get("t/ledger"))["count"] >= 8


async def test_what_is_not_there_is_said(run: RunFolder) -> None:
    async with client(run) as http:
        for name in ("t/group/train/1/999", "t/group/train/77/1", "x/summary", "t/nothing", "t/group/../../1/1"):
            answer = await http.get(f"/doc/{name}")
            assert answer.status_code == 404 and answer.text
        assert (await http.get("/config.json")).status_code == 404
        assert (await http.post("/doc/runs")).status_code == 405


async def test_the_page_may_load_nothing_from_elsewhere(run: RunFolder) -> None:
    async with client(run) as http:
        page = await http.get("/")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert (await http.get("/app.js")).headers["content-type"].startswith("text/javascript")
        assert page.headers["x-frame-options"] == "DENY" and "unsafe" not in policy


async def test_on_loopback_only_names_of_this_machine_are_answered(run: RunFolder) -> None:
    async with client(run) as http:
        for host, code in (("localhost:1", 200), ("[::1]:1", 200), ("evil.example", 403), ("", 403)):
            assert (await http.get("/doc/runs", headers={"Host": host})).status_code == code


async def test_elsewhere_a_token_is_asked_for_once(run: RunFolder) -> None:
    async with client(run, token="sécret") as http:
        assert (await http.get("/")).status_code == 401
        assert (await http.get("/doc/runs", params={"token": "wrong"})).status_code == 401
        first = await http.get("/", params={"token": "sécret"})
        assert first.status_code == 307 and "HttpOnly" in first.headers["set-cookie"]
        assert (await http.get("/doc/runs")).status_code == 200  # by its cookie
        http.cookies.clear()
        assert (await http.get("/doc/runs", headers={"Authorization": "Bearer nothing"})).status_code == 401


async def test_a_change_of_the_run_is_told(run: RunFolder) -> None:
    async with client(run) as http, http.stream("GET", "/events") as stream:
        lines = stream.aiter_lines()
        assert await anext(lines) == "retry: 2000"
        run.write_trajectories(5, run.read_trajectories(2))
        async for line in lines:
            if line.startswith("data:"):
                assert json.loads(line.removeprefix("data:")) == {"run": "t"}
                break
        assert (await http.get("/doc/t/episodes")).json()["count"] == 5 * 8 + 3 * 4


async def test_a_bundle_has_every_document(run: RunFolder, tmp_path: Path) -> None:
    documents = Documents([RunReader(run)])
    write_bundle(documents, tmp_path / "site")
    names = list(documents.names())
    assert len(names) == 1 + 4 + 4 * 2 + 3 * 2
    for name in names:
        text = (tmp_path / "site/data" / file_name(name)).read_text()
        said, data = json.loads(f"[{text.removeprefix('agentrlData(').rstrip().removesuffix(')')}]")
        assert said == name
        json.loads(gzip.decompress(base64.b64decode(data)))
    assert "connect-src 'none'" in (tmp_path / "site/index.html").read_text()
    with pytest.raises(ConfigError, match="not an empty folder"):
        write_bundle(documents, tmp_path / "site")


async def test_the_commands_write_and_refuse(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_TOKEN", raising=False)
    written = CliRunner().invoke(app, ["view", str(run.path), "--bundle", str(tmp_path / "b")])
    assert written.exit_code == 0 and "index.html" in written.stdout
    one = CliRunner().invoke(app, ["view", str(run.path), "--bundle", str(tmp_path / "t.html")])
    assert one.exit_code == 0 and "14 of 14 groups" in one.stdout
    refused = CliRunner().invoke(app, ["view", str(run.path), "--host", "0.0.0.0"])
    assert refused.exit_code == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        in_use = await asyncio.to_thread(CliRunner().invoke, app, ["view", str(run.path), "--port", port])
    assert in_use.exit_code == 2


def test_two_runs_of_one_name_have_two_keys(tmp_path: Path) -> None:
    readers = [RunReader(RunFolder(path=tmp_path / place / "same")) for place in "ab"]
    assert list(Documents(readers).readers) == ["same", "same~2"]


def test_a_page_in_one_file_cannot_be_left_by_what_it_holds() -> None:
    evil = b'"</script><script>alert(1)</script>"'
    page = shell.page_in_one_file({'a"/x': evil}, title="</title><script>")
    assert evil.decode() not in page and "<title>&lt;/title&gt;&lt;script&gt;</title>" in page
    assert page.count("</script>") == 2 and 'data-doc="a&quot;/x"' in page
    (nonce,) = set(re.findall(r"nonce-([\w-]+)", page))
    assert page.count(f'nonce="{nonce}"') == 2


async def test_one_file_holds_the_tables_and_as_many_groups_as_fit(run: RunFolder, tmp_path: Path) -> None:
    documents = Documents([RunReader(run)])
    assert write_one_file(documents, tmp_path / "all.html") == (14, 14)
    assert write_one_file(documents, tmp_path / "few.html", max_bytes=1500)[0] in range(1, 14)
    for name in ("runs", "t/summary", "t/episodes", "t/ledger"):
        assert f'data-doc="{name}"' in (tmp_path / "few.html").read_text()


def test_the_built_page_is_made_from_these_sources() -> None:
    web = ROOT / "agentrl/view/web"
    names = sorted(f"src/{path.name}" for path in (web / "src").iterdir())
    digest = hashlib.sha256()
    for name in (*names, "build.mjs", "package-lock.json"):
        digest.update(name.encode() + b"\0" + (web / name).read_bytes() + b"\0")
    built = re.search(r"sha256 (\w+)", shell.file("app.js")[:300].decode())
    assert built and built[1] == digest.hexdigest(), "in agentrl/view/web: npm ci && npm run build"
    for name in ("preact", "htm", "uplot", "highlight.js"):
        assert name in shell.file("LICENSES.txt").decode()


def test_the_page_is_small() -> None:
    assert sum(len(shell.file(name)) for name in shell.FILES) < 400_000
