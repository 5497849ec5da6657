"""How weights are published: engines that do not join or refuse, unknown and unsafe ways, the calls to vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

import trainer.weights.streamed
from agentrl.config import EngineConfig
from agentrl.engine.base import Receivers
from agentrl.engine.vllm.gloo_group import Deadline, Group, meet
from agentrl.engine.vllm.watch import Watch
from agentrl.errors import ConfigError, LearnerError, WeightsWanted
from agentrl.types import Probe, TransferInit, WeightsRef
from tests.agentrl.training.troubles import Trouble
from trainer.weights.publisher import Publisher, TransferSettings
from trainer.weights.source import WeightSource
from trainer.weights.streamed import EXIT_HUNG, StreamedPublisher, _init_info, json_safe, within
from trainer.weights.transfer import publisher

ENDED = Trouble("...; this process cannot end in an orderly way and is ended")
NOT_TAKEN = Trouble("weights of version ...: the engines did not take them within ... s")


class Silent:
    """An orchestrator that does not answer."""

    def receivers(self, policy_version: int) -> Receivers:
        return Receivers(engines=("one",))

    def open_transfer(self, init: TransferInit) -> None:
        time.sleep(30)

    def publish(self, ref: WeightsRef) -> None:
        time.sleep(30)


def transfer(backend: str, *, timeout_s: float = 1.0) -> TransferSettings:
    return TransferSettings(backend=backend, rank=0, weights_dir=Path("/nowhere"), timeout_s=timeout_s)


@pytest.fixture(scope="module")
def loaded() -> None:
    """Import vLLM first: that takes seconds, which must not count in a publication's time."""
    import vllm.distributed.weight_transfer.factory  # noqa: F401


@pytest.mark.usefixtures("loaded")
def test_engines_that_never_join_end_the_publication(monkeypatch: pytest.MonkeyPatch, tiny_model: Any) -> None:
    monkeypatch.setattr(trainer.weights.streamed, "GRACE_S", 0.2)
    source = WeightSource(tiny_model, dtype=torch.float32)
    sender = publisher(transfer("gloo"), EngineConfig(), source=source, link=Silent())
    started_s = time.monotonic()
    with pytest.raises(LearnerError, match="connecting to the engines"):
        sender.publish(policy_version=0, probe=Probe(token_ids=(), logprobs=()))
    assert time.monotonic() - started_s < 15


def joined(init: TransferInit) -> Group:
    """As an engine joins."""
    info = init.init_info
    store = meet(info["master_address"], info["master_port"], world_size=2, timeout_s=10)
    Watch(store, world_size=2, timeout_s=10, is_sender=False).meet()
    return Group(store, rank=1, world_size=2, address="127.0.0.1", timeout_s=10)


class Refusing(Silent):
    """An orchestrator whose engine joins and then never receives."""

    group: Group | None = None

    def open_transfer(self, init: TransferInit) -> None:
        self.group = joined(init)

    def publish(self, ref: WeightsRef) -> None:
        raise LearnerError("the orchestrator answered 503: paused by others")


def large_module() -> torch.nn.Module:
    """More weights than a connection's buffers hold."""
    return torch.nn.Linear(4096, 4096)


def gloo_sender(module: torch.nn.Module, link: Any, *, update_timeout_s: float) -> Publisher:
    return publisher(
        transfer("gloo", timeout_s=100),
        EngineConfig(update_timeout_s=update_timeout_s),
        source=WeightSource(module, dtype=torch.float32),
        link=link,
    )


@pytest.mark.usefixtures("loaded")
def test_a_refusal_ends_a_broadcast_that_nobody_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.weights.streamed, "GRACE_S", 0.5)
    sender = gloo_sender(large_module(), link := Refusing(), update_timeout_s=30)
    started_s = time.monotonic()
    with pytest.raises(LearnerError, match="503: paused by others"):
        sender.publish(policy_version=0, probe=Probe(token_ids=(), logprobs=()))
    assert time.monotonic() - started_s < 25
    sender.close()
    assert link.group is not None
    link.group.close()


class Restarting(Silent):
    """An orchestrator whose engine is restarted while it receives, and takes the weights the second time."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.received: list[torch.Tensor] = []

    def open_transfer(self, init: TransferInit) -> None:
        self.groups.append(joined(init))

    def publish(self, ref: WeightsRef) -> None:
        if len(self.groups) == 1:
            raise WeightsWanted("it was restarted")
        for name, shape in zip(ref.update_info["names"], ref.update_info["shapes"], strict=True):
            self.received.append(torch.empty(shape))
            assert name in ("weight", "bias")
            self.groups[-1].broadcast(self.received[-1], Deadline(10))


@pytest.mark.usefixtures("loaded")
def test_an_engine_restarted_in_mid_broadcast_gets_the_weights_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.weights.streamed, "GRACE_S", 0.2)
    sender = gloo_sender(large := large_module(), link := Restarting(), update_timeout_s=4)
    probe = Probe(token_ids=(), logprobs=())
    with pytest.raises(WeightsWanted):
        sender.publish(policy_version=0, probe=probe)
    sender.reopen()
    assert sender.publish(policy_version=0, probe=probe) == 4 * (4096 * 4096 + 4096)
    sender.close()
    assert all(torch.equal(a, b) for a, b in zip(link.received, large.parameters(), strict=True))


class Communicator:
    """In place of NCCL's, which needs a GPU: its broadcast hangs until it is aborted."""

    def __init__(self, *, can_be_aborted: bool = True) -> None:
        self.begun, self.aborted = Event(), Event()
        self.can_be_aborted = can_be_aborted

    def destroy(self) -> None:
        if self.can_be_aborted:
            self.aborted.set()

    def broadcast(self) -> None:
        self.begun.set()
        self.aborted.wait()


class OneAnswer(Silent):
    """An orchestrator that answers a publication with an error, some time after the broadcast has begun."""

    def __init__(self, error: Exception, communicator: Communicator, after_s: float = 0.0) -> None:
        self.error, self.communicator, self.after_s = error, communicator, after_s

    def publish(self, ref: WeightsRef) -> None:
        assert self.communicator.begun.wait(30)
        time.sleep(self.after_s)
        raise self.error


class BrokenCommunicator(Communicator):
    def broadcast(self) -> None:
        self.begun.set()
        raise RuntimeError("NCCL error: remote process exited")


class CountedSource(WeightSource):
    """Counts what was taken from its passes."""

    num_taken = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in super().__iter__():
            self.num_taken += 1
            yield pair


def over_nccl(
    monkeypatch: pytest.MonkeyPatch, model: Any, communicator: Communicator, link: Silent
) -> tuple[Publisher, CountedSource]:
    """A publisher with vLLM's own NCCL sender, all but the broadcast of a tensor."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    class Sender(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
        def _broadcast(self, source: Any, meta: Any) -> None:
            group = self.model_update_group
            for _ in self._checked_iter(source, meta):
                group.broadcast()

    def opened(self: StreamedPublisher) -> Any:
        sender = Sender(client=self._client, source=self._source)
        sender.model_update_group = communicator
        return sender

    monkeypatch.setattr(StreamedPublisher, "_opened", opened)
    monkeypatch.setattr(trainer.weights.streamed, "GRACE_S", 0.2)
    source = CountedSource(model, dtype=torch.float32)
    return publisher(transfer("nccl", timeout_s=20.0), EngineConfig(), source=source, link=link), source


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("communicator", [Communicator(), BrokenCommunicator()], ids=["hangs", "breaks"])
def test_an_engine_that_dies_in_mid_broadcast_costs_one_publication(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Any, communicator: Communicator
) -> None:
    """The other ranks gather the layers to the end: so does the sender that failed at the first."""
    monkeypatch.setattr(CountedSource, "is_split", True)
    link = OneAnswer(WeightsWanted("it was restarted"), communicator, after_s=0.5)
    sender, source = over_nccl(monkeypatch, tiny_model, communicator, link)
    with pytest.raises(WeightsWanted):
        sender.publish(policy_version=1, probe=Probe(token_ids=(), logprobs=()))
    assert communicator.aborted.is_set()
    assert source.num_taken == 2 * len(source.metadata())
    sender.reopen()


def test_a_refusal_before_the_first_tensor_leaves_no_rank_waiting(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Any
) -> None:
    """The other ranks gather every layer twice: for the checksum, and for the sending."""

    class Sender:
        def __init__(self, client: Any) -> None:
            self.client = client

        def send_weights(self) -> None:
            self.client.update_weights({})

        def shutdown(self) -> None: ...

    monkeypatch.setattr(StreamedPublisher, "_opened", lambda self: Sender(self._client))
    monkeypatch.setattr(CountedSource, "is_split", True)
    source = CountedSource(tiny_model, dtype=torch.float32)
    sender = publisher(transfer("nccl", timeout_s=20.0), EngineConfig(), source=source, link=AnsweredOnce())
    with pytest.raises(WeightsWanted):
        sender.publish(policy_version=1, probe=Probe(token_ids=(), logprobs=()))
    assert source.num_taken == 2 * len(source.metadata())


class AnsweredOnce(Silent):
    """An orchestrator that refuses the first publication."""

    num_asked = 0

    def publish(self, ref: WeightsRef) -> None:
        self.num_asked += 1
        if self.num_asked == 1:
            raise WeightsWanted("it was restarted")


def test_a_sender_that_was_left_alone_does_not_disturb_the_next_publication(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Any
) -> None:
    """Over gloo a broadcast that nobody receives is not waited for; here it fails in the middle of the next one."""
    fails, senders, num_sent = Event(), list[threading.Thread](), list[int]()

    class Sender:
        def __init__(self, publisher: StreamedPublisher) -> None:
            self.source, self.client = publisher._source, publisher._client

        def send_weights(self) -> None:
            tensors = iter(self.source)
            next(tensors)
            senders.append(threading.current_thread())
            with suppress(WeightsWanted):
                self.client.update_weights({})
                fails.set()
                senders[0].join(30)
                time.sleep(0.5)  # more than GRACE_S
                num_sent.append(1 + len(list(tensors)))
                return
            fails.wait(60)
            raise RuntimeError("the group is closed")

        def shutdown(self) -> None: ...

    monkeypatch.setattr(trainer.weights.streamed, "GRACE_S", 0.2)
    monkeypatch.setattr(StreamedPublisher, "_opened", lambda self: Sender(self))
    source = WeightSource(tiny_model, dtype=torch.float32)
    sender = publisher(transfer("gloo", timeout_s=60), EngineConfig(), source=source, link=AnsweredOnce())
    with pytest.raises(WeightsWanted):
        sender.publish(policy_version=1, probe=Probe(token_ids=(), logprobs=()))
    sender.publish(policy_version=1, probe=Probe(token_ids=(), logprobs=()))
    assert num_sent == [len(source.metadata())]


@pytest.mark.usefixtures("loaded")
def test_a_refused_broadcast_is_aborted_and_names_the_refusal(monkeypatch: pytest.MonkeyPatch, tiny_model: Any) -> None:
    link = OneAnswer(LearnerError("the orchestrator answered 503"), communicator := Communicator())
    sender, _ = over_nccl(monkeypatch, tiny_model, communicator, link)
    with pytest.raises(LearnerError, match="answered 503"):
        sender.publish(policy_version=1, probe=Probe(token_ids=(), logprobs=()))
    assert communicator.aborted.is_set()


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("is_split", [False, True])
def test_a_sender_that_cannot_be_ended_ends_the_process_where_others_depend_on_it(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Any, is_split: bool
) -> None:
    monkeypatch.setattr(trainer.weights.streamed, "ABORT_S", 0.2)
    monkeypatch.setattr(CountedSource, "is_split", is_split)
    ended: list[str] = []
    monkeypatch.setattr(trainer.weights.streamed, "end_process", ended.append)
    link = OneAnswer(WeightsWanted("it was restarted"), communicator := Communicator(can_be_aborted=False))
    sender, _ = over_nccl(monkeypatch, tiny_model, communicator, link)
    with pytest.raises(WeightsWanted):
        sender.publish(policy_version=1, probe=Probe(token_ids=(), logprobs=()))
    assert len(ended) == (is_split or torch.cuda.is_available())
    communicator.aborted.set()


def test_a_process_that_cannot_exit_is_ended_with_a_message() -> None:
    script = (
        "import threading, time; from trainer.weights.streamed import end_process\n"
        "threading.Thread(target=time.sleep, args=(600,)).start(); end_process('sending weights of version 3')"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == EXIT_HUNG
    assert process.stderr.startswith("learner: LearnerError: sending weights of version 3; ")
    assert ENDED.is_in(process.stderr)


def test_a_folder_that_cannot_be_written_is_the_learners_failure(tiny_model: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    blocked = replace(transfer("safetensors"), weights_dir=tmp_path / "file")
    sender = publisher(blocked, EngineConfig(), source=WeightSource(tiny_model, dtype=torch.float32), link=Silent())
    with pytest.raises(LearnerError, match="writing weights of version 3"):
        sender.publish(policy_version=3, probe=Probe(token_ids=(), logprobs=()))


class Loading(Silent):
    """An orchestrator whose engines take a folder when they are told to, or refuse it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_answer = Event()
        self.error = error

    def publish(self, ref: WeightsRef) -> None:
        self.may_answer.wait(60)
        if self.error is not None:
            raise self.error


def test_the_learner_goes_on_while_engines_read_its_folder(tiny_model: Any, tmp_path: Path) -> None:
    link = Loading()
    settings = replace(transfer("safetensors", timeout_s=60), weights_dir=tmp_path)
    sender = publisher(settings, EngineConfig(), source=WeightSource(tiny_model, dtype=torch.float32), link=link)
    num_bytes = sender.publish(policy_version=1, probe=Probe(token_ids=(), logprobs=()))
    assert num_bytes > 0 and len(list(tmp_path.glob("v1-*/model.safetensors"))) == 1
    link.may_answer.set()
    assert sender.proven() > 0
    assert sender.proven() == 0, "there is nothing left to wait for"


def test_what_engines_refuse_meanwhile_is_raised_at_the_next_wait(tiny_model: Any, tmp_path: Path) -> None:
    link = Loading(LearnerError("the orchestrator answered 503: other weights"))
    settings = replace(transfer("safetensors", timeout_s=60), weights_dir=tmp_path)
    sender = publisher(settings, EngineConfig(), source=WeightSource(tiny_model, dtype=torch.float32), link=link)
    sender.publish(policy_version=1, probe=Probe(token_ids=(), logprobs=()))
    link.may_answer.set()
    with pytest.raises(LearnerError, match="other weights"):
        sender.publish(policy_version=2, probe=Probe(token_ids=(), logprobs=()))


def test_engines_that_never_answer_end_the_wait(tiny_model: Any, tmp_path: Path) -> None:
    settings = replace(transfer("safetensors", timeout_s=0.1), weights_dir=tmp_path)
    sender = publisher(settings, EngineConfig(), source=WeightSource(tiny_model, dtype=torch.float32), link=Loading())
    sender.publish(policy_version=1, probe=Probe(token_ids=(), logprobs=()))
    with pytest.raises(LearnerError) as found:
        sender.proven()
    assert NOT_TAKEN.is_in(found.value)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ConfigError, match="pigeon: must be one of safetensors, reload, gloo, nccl, ipc"):
        transfer("pigeon")


class SplitSource(WeightSource):
    is_split = True


def test_ipc_cannot_share_what_zero_3_gives_back(tiny_model: Any) -> None:
    source = SplitSource(tiny_model, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"zero_stage=3.*use nccl"):
        publisher(transfer("ipc"), EngineConfig(), source=source, link=Silent())


@pytest.mark.parametrize("where", [{"host": "0.0.0.0"}, {"url": "http://10.0.0.7:8000"}])
def test_ipc_is_refused_where_others_could_send_pickles(tiny_model: Any, where: dict[str, str]) -> None:
    source = WeightSource(tiny_model, dtype=torch.float32)
    with pytest.raises(ConfigError, match="unpickle"):
        publisher(transfer("ipc"), EngineConfig(**where), source=source, link=Silent())


def test_ipc_handles_travel_in_vllms_own_format() -> None:
    from vllm.distributed.weight_transfer.clients import _json_safe_update_info

    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]], "tensor_sizes": None}
    handles = [{"GPU-1": (torch.Tensor, (2,), 7)}]
    whole = {**info, "ipc_handles": handles, "ipc_handles_pickled": None}
    theirs = {key: value for key, value in _json_safe_update_info(whole).items() if value is not None}
    assert json_safe(whole) == json.loads(json.dumps(json_safe(whole))) == theirs


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_group_is_the_sender_and_every_worker(backend: str) -> None:
    settings = EngineConfig(tensor_parallel=4, url="http://localhost:1", update_timeout_s=7)
    info = _init_info(transfer(backend), settings, num_engines=3)
    assert (info.master_address, info.world_size, info.rank, info.timeout_s) == ("127.0.0.1", 13, 0, 7)
    assert info.is_sender


def test_engines_elsewhere_are_not_sent_the_loopback_address_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"localhost": "127.0.0.1", "10.0.0.6": "10.0.0.5"}
    monkeypatch.setattr("agentrl.engine.vllm.gloo_group.own_address", routes.__getitem__)
    settings = EngineConfig(url=("http://localhost:1", "http://10.0.0.6:2"))
    assert _init_info(transfer("gloo"), settings, num_engines=2).master_address == "10.0.0.5"


def test_ipc_needs_no_group() -> None:
    info = _init_info(replace(transfer("ipc"), rank=1), EngineConfig(), num_engines=1)
    assert (info.backend, info.packed, info.is_sender) == ("ipc", False, False)


def test_an_action_that_never_ends_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.weights.streamed, "GRACE_S", 0.5)
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        within(lambda: time.sleep(20), 0.1, over=Event())


def test_an_actions_own_error_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        within(lambda: 1 // 0, 5, over=Event())
