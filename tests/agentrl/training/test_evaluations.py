"""Evaluations beside training: a spare engine plays with one version while the run makes others."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl.buffer.journal import Journal
from agentrl.config import Config, parse
from agentrl.engine.base import WeightUpdate
from agentrl.errors import ConfigError, EngineError, WeightsWanted, WeightSyncError
from agentrl.report.metrics import read
from agentrl.run_folder import RunFolder
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training.pinned_weights import KeptWeights, linked
from agentrl.types import Probe, WeightsRef
from tests.agentrl.training.whole_run import YesAndNo, make_config, run_with


class Spare(YesAndNo):
    """Reads its weights from the folder that it is given; its answers come once `run` holds `after`."""

    def __init__(self, tokenizer: TurnTokenizer, run: YesAndNo, *, after: int = 0) -> None:
        super().__init__(tokenizer)
        self.run, self.after = run, after
        self.taken: list[str] = []
        self.folders: list[Path] = []

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        assert ref.path is not None
        self.folders.append(Path(ref.path))
        self.taken.append((self.folders[-1] / "model.safetensors").read_text())
        return await super().update_weights(ref)

    async def generate(self, *args: Any, **options: Any) -> Any:
        while self.run.policy_version < self.after:
            await asyncio.sleep(0.005)
        assert self.folders[-1].is_dir(), "an engine that is restarted could not take its weights again"
        return await super().generate(*args, **options)


class Following(YesAndNo):
    """Trains with version 1 and later once version 0 is measured."""

    journal: Path

    async def generate(self, token_ids: Any, sampling: Any, *, request_id: str, session_id: str | None = None) -> Any:
        while request_id.startswith("train") and self.policy_version >= 1 and 0 not in measured(self.journal):
            await asyncio.sleep(0.005)
        return await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)


def config_of(tmp_path: Path, **options: Any) -> Config:
    settings = make_config(tmp_path, **options).model_dump()
    settings["eval"]["engines"] = 1
    return parse(settings, source="test")


def measured(journal: Path) -> list[int]:
    with closing(Journal(journal, read_only=True)) as reading:
        return [one.policy_version for one in reading.evaluations()]


async def whole(config: Config, engine: YesAndNo, spare: YesAndNo, *, version: int = 0) -> RunFolder:
    folder = Path(config.out_dir, config.name)
    run = RunFolder(path=folder) if folder.exists() else RunFolder.create(config.out_dir, config.name, config=config)
    weights_dir = Path(config.out_dir, f"weights-{version}")
    parts = {"run": run, "spare": spare}
    await run_with(config, engine, engine.tokenizer, parts=parts, version=version, weights_dir=weights_dir)
    return run


async def test_training_goes_on_and_what_is_due_meanwhile_is_skipped_by_name(
    tmp_path: Path, tokenizer: TurnTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    config, engine = config_of(tmp_path, eval_every=1), YesAndNo(tokenizer)
    spare = Spare(tokenizer, engine, after=4)  # all four steps are made before version 0 is measured
    with caplog.at_level(logging.WARNING, logger="agentrl.training.evaluations"):
        run = await whole(config, engine, spare)
    assert measured(run.journal) == [0, 4]
    assert spare.taken == ["0"], "the run's own engine, which holds it, measures the last version"
    assert [f"evaluation of version {step} is skipped: that of version 0" in caplog.text for step in (1, 2, 3)] == (
        [True] * 3
    )
    lines = read(run.metrics)
    assert [line.step for line in lines if "eval/skipped" in line.values] == [1, 2, 3]
    first = next(line for line in lines if line.kind == "eval" and line.step == 0)
    assert lines.index(first) > max(lines.index(line) for line in lines if line.kind == "step")
    versions = {turn.completion.version_spans for one in run.read_trajectories(0, kind="eval") for turn in turns(one)}
    assert {span.version for spans in versions for span in spans} == {0}
    assert not (run.checkpoints / "evaluated").exists()


def turns(group: Any) -> list[Any]:
    return [turn for trajectory in group.trajectories for turn in trajectory.turns]


async def test_every_version_that_is_due_is_measured_by_the_spare_engine_in_turn(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    config, engine = config_of(tmp_path, max_lag=0), Following(tokenizer)
    engine.journal = tmp_path / "t" / "journal.sqlite"
    spare = Spare(tokenizer, engine)
    run = await whole(config, engine, spare)
    assert (measured(run.journal), spare.taken) == ([0, 2, 4], ["0", "2"])
    assert [line.step for line in read(run.metrics) if "eval/skipped" in line.values] == []


async def test_a_version_that_changes_during_an_evaluation_ends_the_run(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    class Restless(Spare):
        async def generate(self, *args: Any, **options: Any) -> Any:
            completion = await super().generate(*args, **options)
            self.policy_version = 7
            return completion

    engine = YesAndNo(tokenizer)
    with pytest.raises(WeightSyncError, match="evaluation of version 0 has tokens of version 7"):
        await whole(config_of(tmp_path), engine, Restless(tokenizer, engine))


async def test_a_spare_engine_that_cannot_use_the_changes_ends_the_run(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    class Wanting(Spare):
        async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
            raise WeightsWanted("other weights came of the changes")

    engine = YesAndNo(tokenizer)
    with pytest.raises(WeightSyncError, match="evaluation of version 0: other weights came"):
        await whole(config_of(tmp_path), engine, Wanting(tokenizer, engine))


@pytest.mark.parametrize("engines", [1, 0])
async def test_a_run_that_resumes_repeats_what_was_cut_short(
    tmp_path: Path, tokenizer: TurnTokenizer, caplog: pytest.LogCaptureFixture, engines: int
) -> None:
    class Failing(Spare):
        async def generate(self, *args: Any, **options: Any) -> Any:
            await super().generate(*args, **options)
            raise EngineError("the power went")

    config, engine = config_of(tmp_path, steps=5, eval_every=4), YesAndNo(tokenizer)
    with pytest.raises(EngineError, match="the power went"):
        await whole(config, engine, Failing(tokenizer, engine, after=3))
    journal = tmp_path / "t" / "journal.sqlite"
    assert measured(journal) == []
    again = YesAndNo(tokenizer, policy_version=2)
    config = parse({**config.model_dump(), "eval": {**config.eval.model_dump(), "engines": engines}}, source="test")
    spare = Spare(tokenizer, again)
    with caplog.at_level(logging.WARNING, logger="agentrl.training.evaluations"):
        parts = {"run": RunFolder(path=tmp_path / "t"), "spare": spare if engines else None}
        weights = tmp_path / "other"
        await run_with(config, again, tokenizer, parts=parts, version=2, weights_dir=weights)
    if engines:
        assert spare.taken[0] == "0" and 0 in measured(journal) and measured(journal)[-1] == 5
    else:
        assert "evaluation of version 0 was cut short, and is not repeated: eval.engines=0" in caplog.text
        assert measured(journal) == [2, 4, 5]


def ref_of(**info: Any) -> WeightsRef:
    probe = Probe(token_ids=(1, 2), logprobs=(-0.1,))
    return WeightsRef(policy_version=6, num_bytes=9, update_info=info, checksum="abc", probe=probe)


def test_kept_weights_outlive_the_folders_of_the_learner_and_of_the_process(tmp_path: Path) -> None:
    run = RunFolder(path=tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    for name in ("v4-a", "v5-b", "v6-c"):
        (tmp_path / "learner" / name).mkdir(parents=True)
        (tmp_path / "learner" / name / "model.safetensors").write_text(name)
    ref = ref_of(path=str(tmp_path / "learner/v4-a"), deltas=[str(tmp_path / "learner" / n) for n in ("v5-b", "v6-c")])
    pinned = linked(ref)
    assert (Path(pinned.path or "") / "model.safetensors").stat().st_nlink == 2, "no second copy in memory"
    for name in ("v4-a", "v5-b", "v6-c"):
        (tmp_path / "learner" / name / "model.safetensors").unlink()
    kept = KeptWeights(run).keep(pinned)
    assert kept.checksum == "abc" and kept.probe == ref.probe and not Path(pinned.path or "").exists()
    run.path.rename(tmp_path / "moved")
    again = KeptWeights(RunFolder(path=tmp_path / "moved"))
    found = again.unfinished()
    assert found is not None and found.policy_version == 6
    texts = [(Path(path) / "model.safetensors").read_text() for path in (found.path, *found.update_info["deltas"])]
    assert texts == ["v4-a", "v5-b", "v6-c"]
    again.evaluated()
    assert again.unfinished() is None and Path(found.path or "").is_dir()
    again.drop_others(found)
    assert Path(found.path or "").is_dir()
    again.clear()
    assert not Path(found.path or "").exists()


@pytest.mark.parametrize(("info", "message"), [({}, "in no folder"), ({"path": "/not/here/v6"}, "must see one folder")])
def test_weights_that_this_machine_does_not_see_are_named(info: dict[str, str], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        linked(ref_of(**info))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"weight_transfer": "gloo"}, "takes its weights from a folder"),
        ({"gpus": [1, 2], "replicas": 2}, "3 engines, 1 of them by eval.engines"),
    ],
)
def test_settings_that_spare_engines_cannot_have_are_refused(
    tmp_path: Path, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({**config_of(tmp_path).model_dump(), "engine": engine}, source="test")
