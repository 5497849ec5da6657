"""Whole runs in which one part never answers: they end with a message that names the part all others waited for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.env import Action, Env, StepResult
from agentrl.errors import LearnerError, RunStalled
from agentrl.rollouts.monitored_env import monitored
from agentrl.run_folder import RunFolder
from agentrl.supervision.status import read_status
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.supervision.watchdog import Patience, supervised, watched
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Completion, Sampling
from tests.agentrl.training.whole_run import SayYes, YesAndNo, make_config, orchestrating, run_with

QUICK = Patience(stall_s=2.5, loop_s=30.0, tick_s=0.05)


class Silent(YesAndNo):
    """Answers so often, and then never again."""

    url = "http://engine.example:8000"

    def __init__(self, tokenizer: TurnTokenizer, *, num_answers: int) -> None:
        super().__init__(tokenizer)
        self._num_left = num_answers

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        self._num_left -= 1
        if self._num_left < 0:
            await asyncio.Event().wait()
        return await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)


async def ended_by_name(
    tmp_path: Path, tokenizer: TurnTokenizer, engine: YesAndNo, env_class: type[Env] = SayYes
) -> RunStalled:
    wait_graph = WaitGraph()
    parts = {"wait_graph": wait_graph, "env_class": env_class, "make_env": monitored(env_class, wait_graph)}
    with pytest.raises(RunStalled) as caught:
        async with watched(wait_graph, QUICK, dump=tmp_path / "t" / "logs" / "stall.txt"):
            await run_with(make_config(tmp_path), engine, tokenizer, parts=parts)
    return caught.value


async def test_an_engine_that_never_answers_is_named_with_its_address_and_the_run_says_so_to_others(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    config = make_config(tmp_path)
    limits = config.train.model_copy(update={"stall_timeout_s": 2.0})
    run = RunFolder.create(tmp_path, "t", config=config)
    with pytest.raises(RunStalled) as caught:
        async with supervised(limits, run) as wait_graph:
            engine = Silent(tokenizer, num_answers=0)
            await run_with(config, engine, tokenizer, parts={"wait_graph": wait_graph, "run": run})
    assert "the training loop waits for the episodes (a held-out measurement," in str(caught.value)
    assert "the episodes wait for the engine at http://engine.example:8000 (4 x generate," in str(caught.value)
    assert str(run.logs / "stall.txt") in str(caught.value) and (run.logs / "stall.txt").is_file()
    status = read_status(run.path)
    assert (status.ending, status.progress.phase) == ("failed", "evaluating version 0")
    assert status.why == f"RunStalled: {caught.value}"
    assert (status.progress.gauges.step, status.progress.gauges.num_steps) == (0, 4)


async def test_an_engine_that_falls_silent_in_training_is_named_down_the_whole_chain(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    error = await ended_by_name(tmp_path, tokenizer, Silent(tokenizer, num_answers=14))
    parties = [
        "the training loop waits for the rollouts (a full batch",
        "the rollouts wait for the episodes (",
        "x generate, ",
    ]
    places = [str(error).find(words) for words in parties]
    assert -1 not in places and places == sorted(places)
    text = (tmp_path / "t" / "logs" / "stall.txt").read_text()
    assert re.search(r"task 'group \d+' \(waiting\)", text) and "await asyncio.Event().wait()" in text
    assert re.search(r"ledger: issued \d+, in_flight [1-4], ready", text)


async def test_an_environment_that_never_answers_is_named_with_what_it_was_asked(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    class Stuck(SayYes):
        async def step(self, action: Action) -> StepResult:
            await asyncio.Event().wait()
            raise AssertionError

    error = await ended_by_name(tmp_path, tokenizer, YesAndNo(tokenizer), Stuck)
    assert "the episodes wait for the environment Stuck (4 x step, " in str(error)
    assert "generate" not in str(error)
    assert "in step\n" in (tmp_path / "t" / "logs" / "stall.txt").read_text()


async def test_a_learner_that_never_comes_is_ended_by_its_own_deadline(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    config = make_config(tmp_path)
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"start_timeout_s": 1.2})})
    wait_graph = WaitGraph()
    with pytest.raises(LearnerError, match=r"did not deliver its weights within 1\.2 s"):
        async with (
            watched(wait_graph, replace(QUICK, stall_s=0.5), dump=tmp_path / "stall.txt"),
            orchestrating(config, YesAndNo(tokenizer), tokenizer, wait_graph=wait_graph) as (orchestrator, _),
        ):
            await orchestrator.run()
    assert wait_graph.snapshot().phase == "starting the learner"
    assert not (tmp_path / "stall.txt").exists()


async def test_a_run_leaves_nobody_waiting(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    wait_graph = WaitGraph()
    await run_with(make_config(tmp_path), YesAndNo(tokenizer), tokenizer, parts={"wait_graph": wait_graph})
    wait_graph.loop_turned()
    snapshot = wait_graph.snapshot()
    assert [wait for wait in snapshot.waits if wait.count] == []
    assert snapshot.gauges.step == snapshot.gauges.num_steps == 4
    assert snapshot.gauges.ledger["trained"] == 8
    assert snapshot.gauges.learner_version == 4
