"""Runs with several held-out sets: each is measured, stored and resumed by its name."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl.api.reading import read_run
from agentrl.buffer.journal import Journal
from agentrl.config import Config, parse
from agentrl.errors import EngineError
from agentrl.report.metrics import held_out_lines, read
from agentrl.run_folder import RunFolder
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training.resume import CannotResume, reopen
from agentrl.view.documents import Documents
from agentrl.view.documents import group as group_of
from agentrl.view.documents import summary as summary_of
from agentrl.view.run_reader import RunReader
from tests.agentrl.training.whole_run import SayYes, YesAndNo, held_out_sets, make_config, run_with

HERE = "tests.agentrl.training.test_eval_sets"
SETS = {"easy": {"num_tasks": 3}, "hard": {"target": f"{HERE}:SayNo", "samples_per_task": 4}}


class SayNo(SayYes):
    """The same tasks, of which none is ever solved."""

    async def score(self, episode: Any) -> dict[str, float]:
        return {"correct": 0.0}


def config_of(tmp_path: Path, sets: dict[str, Any] | None = None, **options: Any) -> Config:
    settings = make_config(tmp_path, **options).model_dump()
    settings["env"]["target"] = "tests.agentrl.training.whole_run:SayYes"
    settings["eval"]["sets"] = SETS if sets is None else sets
    return parse(settings, source="test")


def measured(run: RunFolder) -> dict[str, list[int]]:
    """Of each set the versions in the metrics, which the journal has too."""
    with closing(Journal(run.journal)) as journal:
        found = [(one.set_name, one.policy_version) for one in journal.evaluations()]
    lines = {name: [line.step for line in of_set] for name, of_set in held_out_lines(read(run.metrics)).items()}
    assert sorted(found) == sorted((name, step) for name, steps in lines.items() for step in steps)
    return lines


async def whole(config: Config, tokenizer: TurnTokenizer, engine: YesAndNo, *, version: int = 0) -> Any:
    folder = Path(config.out_dir, config.name)
    run = RunFolder(path=folder) if folder.exists() else RunFolder.create(config.out_dir, config.name, config=config)
    parts = {"run": run, "held_out": held_out_sets(config, tokenizer)}
    summary, _ = await run_with(config, engine, tokenizer, parts=parts, version=version)
    return summary, run


async def test_each_set_has_numbers_files_and_a_figure_of_its_own(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    summary, run = await whole(config_of(tmp_path), tokenizer, YesAndNo(tokenizer))
    assert measured(run) == {"easy": [0, 2, 4], "hard": [0, 2, 4]}
    ((before, after),) = summary.others
    assert (summary.before.set_name, summary.after.policy_version, summary.after.num_tasks) == ("easy", 4, 3)
    assert (after.set_name, before.policy_version, after.avg, after.num_tasks, after.n) == ("hard", 0, 0.0, 2, 4)
    names = sorted(path.name for path in run.trajectories.glob("eval*"))
    assert names[:3] == [f"eval-easy_{step:06d}.jsonl.gz" for step in (0, 2, 4)] and len(names) == 6
    found = read_run(run.path)
    assert found.eval_sets == ["easy", "hard"] and found.steps("eval") == found.steps("eval", "hard") == [0, 2, 4]
    assert len(found.episodes("eval", step=4)) == 3 * 2 + 2 * 4
    assert {row["eval_set"] for row in found.episodes("eval", eval_set="hard")} == {"hard"}
    assert {row["eval_set"] for row in found.episodes()} == {""}
    assert len(found.groups(4, "eval")) == 5 and len(found.groups(4, "eval", "hard")) == 2
    with pytest.raises(FileNotFoundError):
        found.episodes("eval", step=3)
    reader = RunReader(run)
    said = summary_of(reader)
    assert [(one["name"], one["columns"]["step"]) for one in said["held_out"]] == [
        ("easy", [0, 2, 4]),
        ("hard", [0, 2, 4]),
    ]
    assert "Held-out success on hard stayed at 0.000." in said["headline"]
    assert said["row"]["eval_last"] == summary.after.avg
    shown = list(reader.index.episodes(kind="eval", step=4))
    assert sorted({row.eval_set for row in shown}) == ["easy", "hard"] and len(shown) == 3 * 2 + 2 * 4
    names = [name for name in Documents([reader]).names() if "/eval-hard/4/" in name]
    assert len(names) == 2 and len(group_of(reader, "eval-hard", 4, int(names[0].rpartition("/")[2]))["episodes"]) == 4


class Interrupted(YesAndNo):
    """Fails in one set at version 2, once the other set's measurement of that version is stored."""

    journal: Path

    async def generate(self, token_ids: Any, sampling: Any, *, request_id: str, session_id: str | None = None) -> Any:
        if request_id.startswith("eval-hard") and self.policy_version == 2:
            while not self._has_easy():
                await asyncio.sleep(0.01)
            raise EngineError("the power went")
        return await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)

    def _has_easy(self) -> bool:
        with closing(Journal(self.journal, read_only=True)) as journal:
            return ("easy", 2) in [(one.set_name, one.policy_version) for one in journal.evaluations()]


async def test_a_run_that_resumes_repeats_only_the_measurement_that_was_cut_short(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    config, broken = config_of(tmp_path), Interrupted(tokenizer)
    broken.journal = tmp_path / "t" / "journal.sqlite"
    with pytest.raises(EngineError, match="the power went"):
        await whole(config, tokenizer, broken)
    assert measured(RunFolder(path=tmp_path / "t")) == {"easy": [0, 2], "hard": [0]}
    engine = YesAndNo(tokenizer)
    engine.policy_version = 2
    _, run = await whole(config, tokenizer, engine, version=2)
    assert measured(run) == {"easy": [0, 2, 4], "hard": [0, 2, 4]}
    assert [line.step for line in read(run.metrics) if line.kind == "eval"].count(2) == 2, "none twice"


async def test_a_set_that_is_new_at_a_resume_is_measured_from_there_on(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    alone = config_of(tmp_path, {}, steps=2)
    _, run = await whole(alone, tokenizer, YesAndNo(tokenizer))
    (run.checkpoints / "final").mkdir()
    with pytest.raises(CannotResume, match="is over: 2 of 2 steps"):
        reopen(run.path, [])
    _, config = reopen(run.path, ["train.steps=4", "eval.sets.new.num_tasks=1"])
    engine = YesAndNo(tokenizer)
    engine.policy_version = 2
    summary, _ = await whole(config, tokenizer, engine, version=2)
    assert measured(run) == {"": [0, 2], "new": [2, 4]}
    assert (summary.before.policy_version, summary.after.policy_version, summary.others) == (2, 4, ())
