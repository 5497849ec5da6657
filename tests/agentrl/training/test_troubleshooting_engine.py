"""Whole runs on a double of a vLLM server that lies, is slow, or is gone. No wrong data is trained on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Config, EngineConfig
from agentrl.engine import launch_servers
from agentrl.engine import pool as engine_pool
from agentrl.engine.base import WeightUpdate
from agentrl.engine.pool import EnginePool
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.engine.weight_updates import UpdateSettings
from agentrl.errors import AgentRLError, EngineError, EngineGone, ErrorRateExceeded, WeightSyncError
from agentrl.report.metrics import MetricsLine, read
from agentrl.run_folder import RunFolder
from agentrl.supervision.serving import free_port
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Trajectory, WeightsRef
from tests.agentrl.engine.vllm_double import Chunks, VLLMDouble, vllm_double
from tests.agentrl.training.troubles import Trouble
from tests.agentrl.training.whole_run import YesAndNo, make_config, run_with

NAN = Trouble(
    "engine at ...: ValueError: a token's logprob is positive or not finite: are the model's logits NaN or infinite?"
)
IDS = Trouble("engine at ...: ValueError: the logprobs are not those of the tokens")
GARBLED = Trouble("engine at ... gave an answer that this client does not understand: ...")
LENGTH = Trouble("engine at ...: ValueError: version spans end at ..., completion has ... tokens")
SLOW = Trouble("engine at ... was not answered within ... s; see the engine's log")
BREAKER = Trouble("... of the last ... groups failed for infrastructure reasons (...)")
NOT_READY = Trouble("the engine at ... was not ready within ... s; raise engine.start_timeout_s or see its log.")
NO_MACHINE = Trouble("engine at ...: GET ...: its machine does not answer; is it running, and its network?")
NO_LISTENER = Trouble("engine at ...: POST ...: nothing listens there; is the engine running?")
RESTORED = Trouble("weights of version ... for the engine at ...: ... It continues with version ...")
UNKNOWN = Trouble("weights of version ...; the previous weights could not be restored either: ...")
TOKEN = Trouble(
    "engine at ... failed with status 401: ...; set AGENTRL_ENGINE_TOKEN to the token that the server was started with"
)
PARITY = Trouble(
    "it does not hold the learner's weights: its logprobs of the probe text differ by ... on average (KL ...), "
    "allowed is ... (KL ...; engine.parity_bound)"
)


def spoilt(change: Callable[[dict[str, Any]], object]) -> Callable[[Chunks], object]:
    """Of an answer: `change` its last event's choice."""
    return lambda chunks: change(chunks[-1]["choices"][0])


GARBAGE = {
    "NaN as vLLM writes it": (NAN, spoilt(lambda last: last["logprobs"]["content"][0].update(logprob=-9999.0))),
    "NaN as it is": (GARBLED, spoilt(lambda last: last["logprobs"]["content"][0].update(logprob=float("nan")))),
    "a logprob too few": (IDS, spoilt(lambda last: last["logprobs"]["content"].pop())),
    "logprobs of other tokens": (IDS, spoilt(lambda last: last["logprobs"]["content"][0].update(token_id=7))),
    "ids without their end": (IDS, spoilt(lambda last: last["token_ids"].pop())),
    "versions of other lengths": (LENGTH, spoilt(lambda last: last["weight_versions"][0].update(end=1))),
}


class Breaking(YesAndNo):
    """Calls `break_it` once, when version 1 is there."""

    def __init__(self, tokenizer: TurnTokenizer, break_it: Callable[[], object]) -> None:
        super().__init__(tokenizer)
        self._break_it: Callable[[], object] | None = break_it

    def _alternate(self, prompt: str) -> str:
        if self.policy_version >= 1 and self._break_it is not None:
            broken, self._break_it = self._break_it, None
            broken()
        return super()._alternate(prompt)


class Versioned(VLLMEngine):
    """Tells its script which version it has."""

    script: YesAndNo

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        update = await super().update_weights(provable(ref))
        self.script.policy_version = ref.policy_version
        return update


def provable(ref: WeightsRef) -> WeightsRef:
    """With the checksum and the probe that only a server with these very weights can answer."""
    version = ref.policy_version
    return replace(
        ref,
        update_info={"version": version, "path": "/w"},
        checksum=f"weights {version}",
        probe=replace(ref.probe, logprobs=(-1.0 - version,)),
    )


async def outcome(
    config: Config, tokenizer: TurnTokenizer, break_it: Callable[[VLLMDouble], object], **settings: Any
) -> AgentRLError | None:
    """What ended a run whose only engine was broken after the first step; None when it went through."""
    script = Breaking(tokenizer, lambda: break_it(double))
    async with vllm_double(script) as double, Versioned(double.url, **settings) as engine:
        engine.script = script
        try:
            await run_with(config, engine, tokenizer)
        except AgentRLError as error:
            return error
        finally:
            assert double.lies == []
    return None


def config_for(tmp_path: Path, **changes: Any) -> Config:
    return make_config(tmp_path, **{"steps": 60, "eval_every": 0, "max_lag": 3, **changes})


def recorded(config: Config) -> list[Trajectory]:
    run = RunFolder.open(Path(config.out_dir) / config.name)
    return [t for step in run.trajectory_steps() for group in run.read_trajectories(step) for t in group.trajectories]


def steps_of(config: Config) -> list[MetricsLine]:
    return [line for line in read(Path(config.out_dir) / config.name / "metrics.jsonl") if line.kind == "step"]


def assert_every_reward_is_earned(config: Config) -> None:
    assert recorded(config)
    for trajectory in recorded(config):
        assert trajectory.reward == float(trajectory.messages[-1].content == "yes")


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_is_never_scored_and_ends_the_run_with_what_was_wrong(
    tmp_path: Path, tokenizer: TurnTokenizer, name: str
) -> None:
    trouble, spoil = GARBAGE[name]
    config = config_for(tmp_path)
    error = await outcome(config, tokenizer, lambda double: setattr(double, "spoil", spoil))
    assert isinstance(error, ErrorRateExceeded)
    assert BREAKER.is_in(error)
    assert trouble.is_in(error)
    assert_every_reward_is_earned(config)


async def test_an_engine_slower_than_its_deadline_ends_the_run(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    config = config_for(tmp_path)
    error = await outcome(config, tokenizer, lambda d: setattr(d, "delay_s", 60.0), request_timeout_s=0.3)
    assert SLOW.is_in(error)
    assert_every_reward_is_earned(config)


async def test_an_engine_that_is_slow_for_a_while_costs_time_alone(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    config = config_for(tmp_path, steps=5)
    began: list[float] = []

    def slow(double: VLLMDouble) -> None:
        began.append(asyncio.get_running_loop().time())
        double.delay_s = 0.5
        asyncio.get_running_loop().call_later(1.0, setattr, double, "delay_s", 0.0)

    assert await outcome(config, tokenizer, slow) is None
    waits = [line.values["wait/learner_for_batch_s"] for line in steps_of(config)]
    assert began and len(waits) == 5
    assert_every_reward_is_earned(config)


async def test_an_engine_that_is_not_there_is_named_with_its_setting() -> None:
    server = launch_servers.EngineServer(url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(EngineError) as found:
        await launch_servers.engines_ready([server], EngineConfig(start_timeout_s=0.3))
    assert NOT_READY.is_in(found.value)


async def test_a_machine_that_does_not_answer_is_given_up_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.engine.vllm_client.NUM_SYN_RETRIES", 1)
    with socket.socket() as listener, socket.socket() as first:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        first.connect(listener.getsockname())  # it fills the queue: the kernel drops what else arrives
        with pytest.raises(EngineGone) as found:
            async with VLLMEngine(f"http://127.0.0.1:{listener.getsockname()[1]}"):
                pass
    assert NO_MACHINE.is_in(found.value)


async def test_an_engine_that_is_gone_ends_the_run(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    config = config_for(tmp_path)
    script = YesAndNo(tokenizer)
    async with vllm_double(script) as double, Versioned(double.url) as engine:
        engine.script = script
        run = asyncio.create_task(run_with(config, engine, tokenizer))
        while double.label < 2:
            await asyncio.sleep(0.01)
        await double.stop()
        with pytest.raises(AgentRLError) as found:
            await run
    assert NO_LISTENER.is_in(found.value)
    assert_every_reward_is_earned(config)


async def test_an_engine_that_wants_another_token_is_named(tokenizer: TurnTokenizer) -> None:
    async with vllm_double(YesAndNo(tokenizer)) as double:
        double.token = "right"
        with pytest.raises(EngineError) as found:
            async with VLLMEngine(double.url, token="wrong"):
                pass
    assert TOKEN.is_in(found.value)


async def test_an_engine_that_computes_something_else_ends_the_run(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    config = config_for(tmp_path)
    error = await outcome(
        config, tokenizer, lambda d: setattr(d, "skew", -0.5), updates=UpdateSettings(parity_bound=0.1)
    )
    assert isinstance(error, WeightSyncError) and PARITY.is_in(error)
    assert_every_reward_is_earned(config)


async def test_an_update_that_the_only_engine_refuses_ends_the_run_and_the_old_weights_are_proven(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    def refuse(double: VLLMDouble) -> None:
        double.refuses = lambda path: path == "start_weight_update" and double.asked[path] == 3

    config = config_for(tmp_path)
    error = await outcome(config, tokenizer, refuse)
    assert isinstance(error, WeightSyncError)
    assert RESTORED.is_in(error)
    assert_every_reward_is_earned(config)


async def test_an_update_that_half_happened_ends_the_run_and_nothing_is_generated_under_it(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    """The weights are in, their label is not: what the server would say of its tokens would be false."""

    config = config_for(tmp_path)
    error = await outcome(config, tokenizer, lambda d: setattr(d, "refuses", half(d, first=2, times=2)))
    assert isinstance(error, WeightSyncError)
    assert UNKNOWN.is_in(error)
    assert_every_reward_is_earned(config)


def half(double: VLLMDouble, *, first: int, times: int) -> Callable[[str], bool]:
    """From the `first` version on, `times` updates load the weights and do not say so."""
    failed = 0

    def refuses(path: str) -> bool:
        nonlocal failed
        if path != "finish_weight_update" or failed == times or double.asked[path] <= first:
            return False
        failed += 1
        double.label = first - 1
        return True

    return refuses


class ProvablePool(EnginePool):
    """Its updates have to be proven."""

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        return await super().update_weights(provable(ref))


async def test_of_two_engines_one_that_half_updates_is_out_until_it_holds_the_present_weights(
    tmp_path: Path, tokenizer: TurnTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token of the run was made by other weights than those that it names, and the run goes on."""
    monkeypatch.setattr(engine_pool, "FIRST_RETURN_S", 0.02)
    config = config_for(tmp_path, steps=12)
    async with vllm_double(YesAndNo(tokenizer)) as good, vllm_double(YesAndNo(tokenizer)) as false:
        false.refuses = half(false, first=2, times=2)  # the update, and the return to the previous weights
        engines = [VLLMEngine(server.url) for server in (good, false)]
        async with ProvablePool(engines) as pool:
            await run_with(config, pool, tokenizer)
            counts = pool.metrics()
        assert good.lies == false.lies == []
        assert good.label == false.label == 12
    assert counts["engine/ejections"] >= 1 and counts["engine/num_serving"] == 2
    assert_every_reward_is_earned(config)
