import datetime
import itertools
import json
import logging
import sys
from pathlib import Path

import pyarrow as arrow
import pytest
from pyarrow import parquet

from agentrl.data.rows import endless, read_tasks
from agentrl.errors import ConfigError, DataError, MissingDependencyError
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
        ("[1]", "expected an object"),
        ({"id": "b", "answer": "1"}, "no 'problem'"),
        ({"problem": 1.5, "answer": "1"}, "'problem' is float"),
        ({"problem": " ", "answer": "1"}, "'problem' is empty"),
        ({"problem": "x", "answer": ["1"]}, "'answer' is list"),
        ({"problem": "x", "answer": True}, "'answer' is bool"),
        ({"problem": "x"}, "no 'answer'"),
        ({"id": "a", "problem": "x", "answer": "1"}, "was used in .*:1"),
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
    assert f"1 rows have a blank answer and are left out: {path}:1" in caplog.text


def marked(text: str) -> str | None:
    return text.partition("####")[2].strip() or None


def test_columns_are_named_by_options(tmp_path: Path) -> None:
    path = write(tmp_path, {"q": "1+1?", "meta": {"gold": "2", "by": "me"}, "key": "k", "answer": "no"})
    (task,) = read_tasks(f"{path}?problem=q&answer=meta.gold&id=key")
    assert task == Task(id="k", prompt="1+1?", answer="2", metadata={"answer": "no", "meta": {"by": "me"}})


def test_a_worked_solution_gives_its_answer_and_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path, {"question": "1+1?", "answer": "One more is 2.\n#### 2"})
    (task,) = read_tasks(path, read_answer=marked)
    assert (task.answer, task.metadata) == ("2", {"solution": "One more is 2.\n#### 2"})


def test_a_solution_is_no_answer_unless_it_marks_one_or_is_named_as_one(tmp_path: Path) -> None:
    path = write(tmp_path, {"problem": "1+1?", "solution": "two"})
    with pytest.raises(DataError, match=r":1: 'solution' marks no answer; .*\?answer=solution"):
        read_tasks(path, need_answers=True, read_answer=marked)
    assert read_tasks(f"{path}?answer=solution", need_answers=True, read_answer=marked)[0].answer == "two"


@pytest.mark.parametrize(
    ("options", "reason"),
    [("problem=q", "no 'q'"), ("answer=meta.gold", "no 'gold'"), ("answer=other.gold", "no 'other.gold'")],
)
def test_a_column_that_is_not_there_names_the_row(tmp_path: Path, options: str, reason: str) -> None:
    path = write(tmp_path, {"problem": "x", "meta": {"by": "me"}})
    with pytest.raises(DataError, match=f":1: {reason}"):
        read_tasks(f"{path}?{options}")


def test_a_chat_of_one_user_message_is_a_prompt_and_another_chat_is_not(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": [{"role": "user", "content": "1+1?"}]})
    assert read_tasks(path)[0].prompt == "1+1?"
    path = write(tmp_path, {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]})
    with pytest.raises(DataError, match=r":1: the prompt is a chat of \['system', 'user'\]"):
        read_tasks(path)


def write_parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


def test_parquet_rows_become_tasks_that_can_travel(tmp_path: Path) -> None:
    day = datetime.date(2024, 2, 1)
    path = write_parquet(tmp_path / "rows.parquet", [{"problem": "1+1?", "answer": 2, "day": day, "tags": ["a"]}])
    assert read_tasks(path) == [
        Task(id="rows-1", prompt="1+1?", answer="2", metadata={"day": "2024-02-01", "tags": ["a"]})
    ]


def test_a_broken_parquet_row_is_named(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"problem": "x", "answer": "1"}] * 2000 + [{"problem": None, "answer": "1"}]
    path = write_parquet(tmp_path / "rows.parquet", rows)
    with pytest.raises(DataError) as caught:
        read_tasks(path)
    assert str(caught.value).startswith(f"{path}: row 2001: no 'problem'")


def test_a_parquet_file_that_is_none_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("not parquet")
    with pytest.raises(ConfigError, match=r"cannot read data file .*rows\.parquet after row 0"):
        read_tasks(tmp_path / "rows.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "rows.parquet", [{"problem": "x"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r"pip install -e .*\[data\]"):
        read_tasks(path)


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
