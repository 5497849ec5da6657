"""Data sets by name: a folder in hub layout, and a small hub on the loopback that a fresh process talks to."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from agentrl.data.hub import choose, locate
from agentrl.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GSM8K = ["README.md", "main/train-0.parquet", "main/test-0.parquet", "socratic/train-0.parquet"]
ROW = '{"question": "1+1?", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("files", "options", "split", "chosen"),
    [
        (GSM8K, {"config": "main"}, "test", ["main/test-0.parquet"]),
        (GSM8K, {"config": "main", "split": "train"}, "test", ["main/train-0.parquet"]),
        (GSM8K, {}, "test", ["main/test-0.parquet"]),
        (["data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet"], {}, "train",
         ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
        (["train/a.jsonl", "eval/a.jsonl"], {}, "test", ["eval/a.jsonl"]),
        (["data/dapo-math-17k.parquet"], {}, "train", ["data/dapo-math-17k.parquet"]),
        (["x/a.jsonl", "y/b.jsonl"], {"files": "y/*.jsonl"}, "test", ["y/b.jsonl"]),
    ],
)  # fmt: skip
def test_options_and_split_choose_files(
    files: list[str], options: dict[str, str], split: str, chosen: list[str]
) -> None:
    assert choose(files, options, split=split, name="set") == chosen


@pytest.mark.parametrize(
    ("files", "options", "split", "reason"),
    [
        (GSM8K, {}, "train", "several folders: main, socratic; choose one with .config=NAME"),
        (["data/all.parquet"], {}, "test", "no .jsonl or .parquet file of split 'test'; there are: data/all.parquet"),
        (["README.md"], {}, "train", "there are: README.md"),
        (["train-00001-of-00003.jsonl"], {}, "train", r"files \[0, 2\] of 3 are missing"),
        (GSM8K, {"files": "nope/*"}, "train", r"no file matches nope/\*"),
    ],
)
def test_what_cannot_be_chosen_says_what_there_is(
    files: list[str], options: dict[str, str], split: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose(files, options, split=split, name="set")


def test_a_folder_in_hub_layout_needs_no_hub(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "main").mkdir(exist_ok=True)
        (tmp_path / "main" / f"{split}-00000-of-00001.jsonl").write_text(ROW)
    place = locate(f"{tmp_path}?config=main", split="test")
    assert place.files == (tmp_path / "main" / "test-00000-of-00001.jsonl",)


def test_a_file_with_a_question_mark_in_its_name_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "what?.jsonl"
    path.write_text(ROW)
    assert locate(path, split="train").files == (path,)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("rows.jsonl?colour=red", "unknown option 'colour'; known: config"),
        ("rows.jsonl?answr=x", "did you mean 'answer'"),
        ("rows.jsonl?answer=", "'answer' needs a value"),
        ("hf:gsm8k", "write hf:owner/name"),
    ],
)
def test_a_name_that_cannot_be_read_says_why(data: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        locate(data, split="train")


class Hub(http.server.BaseHTTPRequestHandler):
    """Three routes of the hub: what a data set is, the tree of its files, and a file."""

    files: ClassVar = {"main/test-00000-of-00001.jsonl": ROW, "main/train-00000-of-00001.jsonl": "not asked for"}

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/datasets/openai/gsm8k/tree/"):
            tree = [{"type": "file", "path": name, "size": len(text), "oid": "0"} for name, text in self.files.items()]
            return self.answer(json.dumps(tree))
        if path.startswith("/api/datasets/openai/gsm8k"):
            siblings = [{"rfilename": name} for name in self.files]
            return self.answer(json.dumps({"id": "openai/gsm8k", "sha": COMMIT, "siblings": siblings}))
        name = re.sub("^/datasets/openai/gsm8k/resolve/[^/]+/", "", path)
        return self.answer(self.files[name]) if name in self.files else self.answer("", status=404)

    do_HEAD = do_GET

    def answer(self, text: str, *, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("ETag", f'"{hashlib.sha1(text.encode()).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def answers(data: str, *, endpoint: str, home: Path) -> str:
    """What a fresh process reads of `data`, since the hub's address is fixed when its library is imported."""
    code = (
        "import sys; from agentrl.errors import ConfigError; from envs.datasets import read_rows\n"
        "try: print([(t.id, t.answer) for t in read_rows(sys.argv[1], 'test')])\n"
        "except ConfigError as error: print(error)"
    )
    env = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run([sys.executable, "-c", code, data], env=env, capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_rows_come_from_a_hub_then_from_its_cache(tmp_path: Path) -> None:
    data, rows = "hf:openai/gsm8k?config=main&answer=answer", "[('gsm8k-test-00000-of-00001-1', '2')]"
    with serving() as endpoint:
        assert answers(data, endpoint=endpoint, home=tmp_path) == rows
        assert "no such data set" in answers("hf:openai/gsm9k", endpoint=endpoint, home=tmp_path)
    assert answers(data, endpoint=endpoint, home=tmp_path) == rows
    unreached = answers("openai/gsm9k", endpoint=endpoint, home=tmp_path)
    assert unreached.startswith("openai/gsm9k: no such path here, and the hub cannot be reached (")
