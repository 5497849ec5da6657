"""The learner process against the orchestrator's real HTTP app; only the batches are made by hand."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.config import Config, save
from agentrl.engine.base import Receivers
from agentrl.engine.checksum import checksum_of
from agentrl.errors import EngineError, LearnerError, RunOver, WeightsWanted
from agentrl.supervision.child import Child, child
from agentrl.supervision.serving import free_port, serving
from agentrl.training import launch
from agentrl.training.learner_api import create_app
from agentrl.types import Batch, StepOutput, TransferInit, WeightsRef
from tests.device import without_gpus
from tests.one_session import OneSession
from tests.trainer.trainer_builders import batch, config, mixed_groups, plain_logprobs
from trainer import ranks
from trainer.learner import Learner
from trainer.orchestrator_client import NoBatch, OrchestratorClient
from trainer.weights.source import WeightSource

TOKEN = "secret"
DEADLINE_S = 240.0
ALONE = (sys.executable, "-m", "trainer")


class Recorder:
    """Gives a batch for each version, then says that the run is over; keeps the learner's reports."""

    def __init__(self, groups: list[Any], num_steps: int) -> None:
        self.groups, self.num_steps = groups, num_steps
        self.outputs: list[StepOutput] = []
        self.refs: list[WeightsRef] = []
        self.is_finished = False
        self.published: list[dict[str, torch.Tensor]] = []

    async def next_batch(self, policy_version: int, num_known: int) -> Batch:
        if policy_version >= self.num_steps:
            raise RunOver
        return batch(self.groups, version=policy_version)

    async def step_done(self, output: StepOutput) -> None:
        self.outputs.append(output)

    async def weights_published(self, ref: WeightsRef) -> None:
        self.refs.append(ref)
        assert ref.path is not None
        tensors = load_file(Path(ref.path) / "model.safetensors")
        assert checksum_of(tensors.items()) == ref.checksum
        self.published.append(tensors)

    async def receivers(self, policy_version: int) -> Receivers:
        raise AssertionError("a folder needs no group")

    async def transfer_opened(self, init: TransferInit) -> None:
        raise AssertionError("a folder needs no connection")

    async def engine_failed(self, error: EngineError) -> None:
        raise AssertionError("there is no engine here")

    async def finished(self) -> None:
        self.is_finished = True


@contextmanager
def server(port: Any) -> Iterator[str]:
    """The real app in a thread with its own event loop."""
    ready, stop, urls = Event(), Event(), list[str]()

    async def main() -> None:
        async with serving(create_app(OneSession(port), token=TOKEN), host="127.0.0.1", port=0) as url:
            urls.append(url)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield urls[0]
    finally:
        stop.set()
        thread.join(10)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each process the environment of a user's shell."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)


def under_deepspeed() -> list[str]:
    port = free_port()
    program = str(Path(sys.executable).with_name("deepspeed"))
    return [program, "--num_gpus", "2", "--master_port", str(port), "--module", "trainer"]


async def ended(part: AbstractAsyncContextManager[Child]) -> tuple[int, str]:
    """Exit code and output. All ranks have ended when this returns or raises."""
    async with part as process:
        async with asyncio.timeout(DEADLINE_S):
            code = await process.wait()
        return code, process.log_path.read_text()


def learner_process(
    url: str, folder: Path, *options: str, token: str = TOKEN, start: Sequence[str] = ALONE
) -> tuple[int, str]:
    command = [*start, "--config", str(folder / "config.json"), "--orchestrator", url, *options]
    command += ["--weights-dir", str(folder / "weights"), "--run-dir", str(folder / "run")]
    env = {"AGENTRL_TOKEN": token, "OMP_NUM_THREADS": "1", **without_gpus()}
    return asyncio.run(ended(child("learner", command, log_path=folder / "learner.log", env=env)))


class InParts(Recorder):
    """Gives the first batch group by group, the second as a whole, and of a third one group before the run ends.

    An engine is restarted while the first batch is incomplete.
    """

    async def next_batch(self, policy_version: int, num_known: int) -> Batch:
        if policy_version == 0 and num_known == 1 and len(self.refs) == 1:
            raise WeightsWanted
        if policy_version == self.num_steps and not num_known:
            return replace(batch(self.groups[:1], version=policy_version), num_missing=2)
        whole = await super().next_batch(policy_version, num_known)
        if policy_version > 0:
            return whole
        rest = len(whole.groups) - num_known - 1
        return replace(whole, groups=whole.groups[num_known : num_known + 1], num_missing=rest)


def test_the_process_trains_publishes_and_exports(tiny_model_dir: Path, tiny_model: Any, tmp_path: Path) -> None:
    """Also where a batch comes in parts; the one that never becomes whole leaves no trace."""
    settings = config(
        tiny_model_dir,
        learner={"lr": 1e-3, "save_every": 1, "stream_groups": True},
        rollout={"max_lag": 0, "groups_per_step": 3, "group_size": 4},
    )
    save(settings, tmp_path / "config.json")
    recorder = InParts(mixed_groups(tiny_model), num_steps=2)
    with server(recorder) as url:
        code, text = learner_process(url, tmp_path)
    assert code == 0, text
    assert [ref.policy_version for ref in recorder.refs] == [0, 0, 1, 2]
    assert [output.policy_version for output in recorder.outputs] == [1, 2]
    assert {"learner/wait_batch_s", "learner/publish_s", "learner/publish_bytes_per_s", "learner/ess_ratio"} <= set(
        recorder.outputs[0].metrics
    )
    early_s = [output.metrics["learner/early_gradient_s"] for output in recorder.outputs]
    assert 0 < early_s[0] < recorder.outputs[0].metrics["learner/step_s"] and early_s[1] == 0
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["final", "states", "step_1", "step_2"]
    for ref, tensors in zip(recorder.refs, recorder.published, strict=True):
        tiny_model.load_state_dict(tensors, strict=False)
        with torch.no_grad():
            scored_T = plain_logprobs(tiny_model, ref.probe.token_ids)
        torch.testing.assert_close(scored_T, torch.tensor(ref.probe.logprobs), rtol=0, atol=1e-5)
    final = load_file(tmp_path / "run/checkpoints/final/model.safetensors")
    assert all(torch.equal(final[name], tensor) for name, tensor in recorder.published[3].items())
    assert not torch.equal(recorder.published[0]["model.norm.weight"], recorder.published[2]["model.norm.weight"])
    ranks.set_defaults(os.environ)
    alone = Learner(settings)
    alone.step(batch(recorder.groups))
    for name, weight in WeightSource(alone.model, dtype=torch.float32):
        torch.testing.assert_close(recorder.published[2][name], weight, rtol=1e-4, atol=2e-5)


def test_without_a_token_the_process_ends_with_one_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    save(config(tiny_model_dir), tmp_path / "config.json")
    code, text = learner_process("http://127.0.0.1:1", tmp_path, token="")
    assert code == 1
    assert text == "learner: ConfigError: set AGENTRL_TOKEN to the orchestrator's token\n"


def test_an_orchestrator_that_is_gone_ends_the_wait() -> None:
    orchestrator = OrchestratorClient("http://127.0.0.1:1", token=TOKEN, gone_after_s=0.2)
    with pytest.raises(LearnerError, match=r"127\.0\.0\.1:1 is gone"):
        orchestrator.poll(0)
    orchestrator.close()


def test_a_wrong_token_is_told_at_once() -> None:
    with server(Recorder([], 0)) as url:
        orchestrator = OrchestratorClient(url, token="wrong")
        with pytest.raises(LearnerError, match="401"):
            orchestrator.report(StepOutput(policy_version=1, metrics={}))
        orchestrator.close()


def test_a_finished_run_is_over() -> None:
    with server(Recorder([], 0)) as url:
        orchestrator = OrchestratorClient(url, token=TOKEN)
        assert orchestrator.poll(0) is NoBatch.RUN_OVER
        orchestrator.close()


class Group(Recorder):
    """Two engines, of which one dies before it has joined."""

    async def receivers(self, policy_version: int) -> Receivers:
        return Receivers(engines=(f"a has not {policy_version}", "b"))

    async def transfer_opened(self, init: TransferInit) -> None:
        if init.init_info["world_size"] == 3:
            raise WeightsWanted


def test_the_learner_asks_who_takes_its_weights_and_hears_of_one_that_cannot_join() -> None:
    with server(Group([], 0)) as url:
        orchestrator = OrchestratorClient(url, token=TOKEN)
        assert orchestrator.receivers(4) == Receivers(engines=("a has not 4", "b"))
        with pytest.raises(WeightsWanted):
            orchestrator.open_transfer(TransferInit(init_info={"world_size": 3}))
        orchestrator.open_transfer(TransferInit(init_info={"world_size": 2}))
        orchestrator.close()


class Forgetful(Recorder):
    """One engine is restarted while it takes version 1, and once more before the second batch."""

    async def next_batch(self, policy_version: int, num_known: int) -> Batch:
        if policy_version == 1 and len(self.refs) == 3:
            raise WeightsWanted
        return await super().next_batch(policy_version, num_known)

    async def weights_published(self, ref: WeightsRef) -> None:
        await super().weights_published(ref)
        if len(self.refs) == 2:
            raise WeightsWanted


def as_agentrl_train_does(url: str, folder: Path, settings: Config) -> tuple[int, str]:
    return asyncio.run(
        ended(
            launch.learner_process(
                settings,
                config_path=folder / "config.json",
                orchestrator_url=url,
                weights_dir=folder / "weights",
                run_dir=folder / "run",
                token=TOKEN,
            )
        )
    )


def folders(path: Path) -> list[str]:
    return sorted(folder.name for folder in path.iterdir())


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints/final/model.safetensors")


def test_torchrun_is_the_module_that_agentrl_train_starts() -> None:
    (torchrun,) = entry_points(group="console_scripts", name="torchrun")
    assert torchrun.value == "torch.distributed.run:main"


@pytest.mark.slow
@pytest.mark.timeout(550)
def test_two_ranks_under_torchrun_go_on_under_deepspeed_as_if_never_stopped(
    tiny_model_dir: Path, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They also publish again, together, for a restarted engine."""
    for name, value in without_gpus().items():
        monkeypatch.setenv(name, value)
    learner = {"lr": 1e-3, "zero_stage": 2, "checkpoint_every": 2, "num_ranks": 2}
    engine = {"url": "http://127.0.0.1:1"}  # the recorder takes the weights: no GPU is kept for an engine
    # Without lag a publication is proven before the next batch is asked for, so the calls have one order.
    rollout = {"max_lag": 0}
    settings = config(tiny_model_dir, learner=learner, engine=engine, algorithm={"rho_base": "auto"}, rollout=rollout)
    whole, again = tmp_path / "whole", tmp_path / "again"
    for folder in (whole, again):
        folder.mkdir()
        save(settings, folder / "config.json")
    recorder = Forgetful(mixed_groups(tiny_model), num_steps=3)
    with server(recorder) as url:
        code, text = as_agentrl_train_does(url, whole, settings)
        assert code == 0, text
        assert "announcing its folder again" in text
        states = whole / "run/checkpoints/states"
        assert folders(states) == ["v2", "v3"]
        code, text = learner_process(url, again, "--resume", str(states / "v2"), start=under_deepspeed())
        assert code == 0, text
    assert "resumed at version 2" in text and "rho_base is being learned, from 1 of 5 steps so far" in text
    assert [ref.policy_version for ref in recorder.refs] == [0, 1, 1, 1, 2, 3, 2, 3]
    assert recorder.refs[1] == recorder.refs[2]
    assert recorder.refs[2].checksum == recorder.refs[3].checksum and recorder.refs[2].path != recorder.refs[3].path
    assert [output.policy_version for output in recorder.outputs] == [1, 2, 3, 3]
    assert recorder.outputs[2].ess_ratio == recorder.outputs[3].ess_ratio
    expected, found = final_weights(whole / "run"), final_weights(again / "run")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert folders(again / "run/checkpoints/states") == ["v3"]


def test_a_batch_survives_the_wire(tiny_model: Any) -> None:
    recorder = Recorder(mixed_groups(tiny_model), num_steps=1)
    with server(recorder) as url:
        orchestrator = OrchestratorClient(url, token=TOKEN)
        assert orchestrator.poll(0) == batch(recorder.groups)
        orchestrator.close()
