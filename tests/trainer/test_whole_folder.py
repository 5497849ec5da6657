"""A folder is replaced as a whole, or not at all, whatever an earlier writer left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.whole_folder import remove_unfinished, unfinished, whole_folder


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_new_folder_takes_the_place_of_the_old_one_as_a_whole(tmp_path: Path, is_durable: bool) -> None:
    target = tmp_path / "out" / "v1"
    for name in ("a", "b"):
        with whole_folder(target, is_durable=is_durable) as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / name).write_text(name)
    assert content(tmp_path) == {"out/v1/inner/b": "b"}


def test_a_block_that_raises_leaves_the_old_folder(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "v1") as folder:
        (folder / "a").write_text("a")
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "v1") as folder:
        (folder / "b").write_text("b")
        raise KeyboardInterrupt
    assert content(tmp_path) == {"v1/a": "a"}


def test_what_killed_writers_left_is_no_part_of_the_next_folder(tmp_path: Path) -> None:
    target = tmp_path / "v1"
    for left in (unfinished(target), tmp_path / ".v1.replaced", target):
        left.mkdir()
        (left / "old").write_text("old")
    with whole_folder(target) as folder:
        (folder / "a").write_text("a")
    assert content(tmp_path) == {"v1/a": "a"}


def test_unfinished_folders_of_a_pattern_are_removed(tmp_path: Path) -> None:
    for name in (".v1.writing", ".v2.replaced", ".other.writing", "v3"):
        (tmp_path / name).mkdir()
    remove_unfinished(tmp_path, "v*")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.writing", "v3"]
