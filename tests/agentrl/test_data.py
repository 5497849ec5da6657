import itertools
import json
import logging
from pathlib import Path

import pytest

from agentrl.data import endless, read_tasks
from agentrl.errors import ConfigError, DataError
from agentrl.types import Task


def write(folder: Path, *lines: object) -> Path:
    path = folder / "rows.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_a_row_becomes_a_task(tmp_path: Path) -> None:
    path = write(tmp_path, {"id": "a", "problem": "1+1?\u2028", "answer": 2, "level": 5}, "", {"prompt": "x"})
    assert read_tasks(path) == [
        Task(id="a", prompt="1+1?\u2028", answer="2", metadata={"level": 5}),
        Task(id="rows-3", prompt="x"),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not valid JSON"),
        ("[1]", "wanted an object"),
        ({"id": "b", "answer": "1"}, "no 'problem'"),
        ({"problem": 1.5, "answer": "1"}, "'problem' is float"),
        ({"problem": " ", "answer": "1"}, "'problem' is empty"),
        ({"problem": "x", "answer": ["1"]}, "'answer' is list"),
        ({"problem": "x", "answer": True}, "'answer' is bool"),
        ({"problem": "x"}, "no 'answer'"),
        ({"id": "a", "problem": "x", "answer": "1"}, "was used on line 1"),
    ],
)
def test_a_broken_row_names_file_and_line(tmp_path: Path, row: object, reason: str) -> None:
    path = write(tmp_path, {"id": "a", "problem": "x", "answer": "1"}, row)
    with pytest.raises(DataError, match=reason) as caught:
        read_tasks(path, need_answers=True)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_bytes_that_are_not_utf8_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"problem": "x"}\n{"problem": "\xff"}\n')
    with pytest.raises(DataError, match=r":2: not UTF-8"):
        read_tasks(path)


def test_blank_answers_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, {"problem": "x", "answer": ""}, {"id": "b", "problem": "y", "answer": "1"})
    with caplog.at_level(logging.WARNING):
        assert [task.id for task in read_tasks(path, need_answers=True)] == ["b"]
    assert "lines 1" in caplog.text


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_rows_is_a_config_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="holds no rows"):
        read_tasks(tmp_path / "rows.jsonl")


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read data file"):
        read_tasks(tmp_path / "nothing.jsonl")


def test_epochs_hold_every_row_once_in_an_order_fixed_by_the_seed() -> None:
    tasks = [Task(id=str(i), prompt="x") for i in range(20)]
    ids = [task.id for task in itertools.islice(endless(tasks, seed=1), 40)]
    assert sorted(ids[:20]) == sorted(ids[20:]) == sorted(task.id for task in tasks)
    assert ids[:20] != ids[20:]
    assert ids == [task.id for task in itertools.islice(endless(tasks, seed=1), 40)]
