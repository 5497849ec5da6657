"""What our weight transfer uses of vLLM, by name: an upgrade that changes it fails here, and says where.

NCCL and CUDA IPC cannot run without a GPU; test_nccl.py and test_ipc.py run them over stand-ins for what needs one.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from agentrl.engine.checksum import checksum_of

TRANSFER = "vllm.distributed.weight_transfer"
RELOAD = "vllm.model_executor.model_loader.reload"


def named(path: str) -> Any:
    module, _, attributes = path.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        (f"{TRANSFER}.base:WeightTransferEngine", "config vllm_config device model"),
        (f"{TRANSFER}.base:WeightTransferEngine.init_transfer_engine", "self init_info"),
        (f"{TRANSFER}.base:WeightTransferEngine.parse_init_info", "self init_dict"),
        (f"{TRANSFER}.base:WeightTransferEngine.parse_update_info", "self update_dict"),
        (f"{TRANSFER}.base:WeightTransferEngine.update_weights", "self update_info"),
        (f"{TRANSFER}.base:WeightTransferEngine.start_weight_update", "self"),
        (f"{TRANSFER}.base:WeightTransferEngine.finish_weight_update", "self"),
        (f"{TRANSFER}.base:WeightTransferEngine.shutdown", "self"),
        (f"{TRANSFER}.base:TrainerWeightTransferEngine", "client source is_sender"),
        (f"{TRANSFER}.base:TrainerWeightTransferEngine.trainer_init", "init_info client source"),
        (f"{TRANSFER}.base:TrainerWeightTransferEngine.send_weights", "self"),
        (f"{TRANSFER}.base:TrainerWeightTransferEngine.shutdown", "self"),
        (f"{TRANSFER}.factory:WeightTransferEngineFactory.register_engine", "name module_path_or_cls class_name"),
        (f"{TRANSFER}.factory:WeightTransferTrainerFactory.register_engine", "name module_path_or_cls class_name"),
        (f"{TRANSFER}.factory:WeightTransferTrainerFactory.trainer_init", "init_info client source"),
        (f"{TRANSFER}.nccl_engine:NCCLWeightTransferEngine", "config vllm_config device model"),
        (f"{TRANSFER}.nccl_engine:NCCLWeightTransferEngine.receive_weights", "self update_info"),
        (f"{TRANSFER}.nccl_engine:NCCLWeightTransferEngine.finish_weight_update", "self"),
        (f"{TRANSFER}.ipc_engine:IPCWeightTransferEngine", "config vllm_config device model"),
        (f"{TRANSFER}.ipc_engine:IPCWeightTransferEngine.receive_weights", "self update_info"),
        (f"{TRANSFER}.ipc_engine:IPCWeightTransferEngine.finish_weight_update", "self"),
        (f"{RELOAD}:initialize_layerwise_reload", "model"),
        (f"{RELOAD}.layerwise:finalize_layerwise_processing", "model model_config"),
        ("vllm.v1.worker.gpu_worker:Worker.init_weight_transfer_engine", "self init_info"),
        ("vllm.v1.worker.gpu_worker:Worker.update_weights", "self update_info"),
        ("vllm.v1.worker.gpu_worker:Worker.get_model", "self"),
        ("vllm.entrypoints.serve.dev.sleep.api_router:sleep", "raw_request level mode"),
        ("vllm.entrypoints.serve.dev.sleep.api_router:wake_up", "raw_request"),  # reads `tags` from its query
        ("vllm.v1.worker.gpu_worker:Worker.sleep", "self level"),
        ("vllm.v1.worker.gpu_worker:Worker.wake_up", "self tags"),
    ],
)
def test_a_call_takes_what_we_give_it(path: str, parameters: str) -> None:
    assert list(inspect.signature(named(path)).parameters) == parameters.split()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (f"{TRANSFER}.base:ParamMeta", "name dtype shape"),
        (f"{TRANSFER}.base:TrainerInitInfo", "rank"),
        (f"{TRANSFER}.nccl_engine:NCCLWeightTransferUpdateInfo", "names dtype_names shapes"),
        (
            f"{TRANSFER}.nccl_engine:NCCLTrainerInitInfo",
            "rank master_address master_port world_size packed packed_buffer_size_bytes packed_num_buffers",
        ),
        (f"{TRANSFER}.ipc_engine:IPCTrainerInitInfo", "rank packed packed_buffer_size_bytes"),
        (
            f"{TRANSFER}.ipc_engine:IPCWeightTransferUpdateInfo",
            "names dtype_names shapes ipc_handles ipc_handles_pickled tensor_sizes",
        ),
    ],
)
def test_a_record_has_the_fields_we_fill(path: str, fields: str) -> None:
    assert [field.name for field in dataclasses.fields(named(path))] == fields.split()


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_vllms_trainer_side_asks_its_client_for_what_ours_has(backend: str) -> None:
    from trainer.weights.streamed import _SyncClient

    protocol = named(f"{TRANSFER}.base:VLLMWeightSyncClient")
    asked = {name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert asked == {
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    }
    for name in asked:
        ours, theirs = (inspect.signature(getattr(side, name)) for side in (_SyncClient, protocol))
        assert list(ours.parameters) == list(theirs.parameters)
    sender = named(f"{TRANSFER}.{backend}_engine:{backend.upper()}TrainerWeightTransferEngine")
    assert sender.init_info_cls.backend == backend


def test_the_gloo_ends_speak_as_vllms_nccl_ends_do() -> None:
    from agentrl.engine.vllm.gloo import GlooInitInfo, GlooUpdateInfo

    def names(record: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(record)}

    assert names(GlooUpdateInfo) == names(named(f"{TRANSFER}.nccl_engine:NCCLWeightTransferUpdateInfo"))
    assert names(GlooInitInfo) - {"timeout_s"} < names(named(f"{TRANSFER}.nccl_engine:NCCLWeightTransferInitInfo"))


@pytest.mark.parametrize("name", ["safetensors", "gloo", "agentrl_nccl", "agentrl_ipc"])
def test_every_backend_can_be_made(name: str) -> None:
    from agentrl.engine.vllm.plugin import register

    register()
    engine = named(f"{TRANSFER}.factory:WeightTransferEngineFactory")._registry[name]()
    assert not inspect.isabstract(engine)
    assert engine.supports_draft_weight_update is False
    assert dataclasses.is_dataclass(engine.init_info_cls) and dataclasses.is_dataclass(engine.update_info_cls)


@pytest.mark.parametrize("name", ["NCCLEngine", "IPCEngine"])
def test_vllms_engines_load_through_the_attribute_that_we_replace(name: str) -> None:
    engine = named(f"agentrl.engine.vllm.device:{name}")
    ours, theirs = engine.__mro__[1:3]
    assert ours.__module__ == "agentrl.engine.vllm.device" and theirs.__module__.startswith(TRANSFER)
    assert "self.model.load_weights" in inspect.getsource(theirs.receive_weights)
    assert engine.start_weight_update is ours.start_weight_update
    assert engine.finish_weight_update is ours.finish_weight_update


def test_the_worker_has_what_our_extension_reads() -> None:
    from agentrl.engine.vllm.worker import WorkerExtension

    worker = named("vllm.v1.worker.gpu_worker:Worker")
    assert not [name for name in vars(WorkerExtension) if not name.startswith("__") and hasattr(worker, name)]
    source = inspect.getsource(worker.__init__) + inspect.getsource(named("vllm.v1.worker.worker_base:WorkerBase"))
    assert all(f"self.{name}" in source for name in ("weight_transfer_engine", "vllm_config", "model_runner"))


def test_memory_is_released_and_taken_again_under_the_names_that_we_use() -> None:
    assert named("vllm.v1.executor.abstract:SLEEP_TAGS") == {"weights", "kv_cache"}
    assert "keep" in get_args(named("vllm.v1.engine:PauseMode"))
    assert named("vllm.config:ModelConfig.enable_sleep_mode") is False  # what our worker extension reads
    # Buffers are put back after level 2, which loses all memory; an update writes only what a checkpoint has.
    assert "_sleep_saved_buffers" in inspect.getsource(named("vllm.v1.worker.gpu_worker:Worker.wake_up"))


class StandIn:
    """Where vLLM's engine class would be: loads two tensors it got from nowhere, or fails between them."""

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self.model, self.model_config, self.device = model, model_config, torch.device("cpu")
        self.fails, self.num_started, self.num_finished = False, 0, 0

    def arriving(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.full((2, 3), 5.0)
        if self.fails:
            raise RuntimeError("the connection broke")
        yield "bias", torch.zeros(2)

    def start_weight_update(self) -> None:
        self.num_started += 1

    def receive_weights(self, update_info: Any) -> None:
        for pair in self.arriving():
            self.model.load_weights([pair])

    def finish_weight_update(self) -> None:
        self.num_finished += 1


class Loadable(nn.Linear):
    def load_weights(self, weights: Any) -> set[str]:
        pairs = dict(weights)
        for name, tensor in pairs.items():
            getattr(self, name).data.copy_(tensor)
        return set(pairs)


@pytest.fixture
def proven(tmp_path: Path) -> Any:
    from agentrl.engine.vllm.device import _Proven

    class Engine(_Proven, StandIn):
        pass

    model = Loadable(3, 2)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    return Engine(model, SimpleNamespace(model=str(tmp_path), revision=None))


def update(*names: str) -> Any:
    shapes = {"weight": [2, 3], "bias": [2]}
    return SimpleNamespace(names=list(names), shapes=[shapes.get(name, [1]) for name in names])


def test_the_mixin_sums_what_vllms_engine_loads(proven: Any) -> None:
    model = proven.model
    proven.receive_weights(update("weight", "bias"))
    assert proven.checksum == ""  # nothing is finished
    proven.finish_weight_update()
    assert proven.checksum == checksum_of(model.state_dict().items())
    assert float(model.weight.detach()[0, 0]) == 5 and proven.model is model and proven.num_finished == 1


@pytest.mark.parametrize(("names", "reason"), [(["weight"], "lacks.*bias"), (["weight", "bias", "x"], "unknown.*x")])
def test_the_mixin_refuses_another_models_weights(proven: Any, names: list[str], reason: str) -> None:
    before = proven.model.weight.clone()
    proven.start_weight_update()
    with pytest.raises(ValueError, match=reason):
        proven.receive_weights(update(*names))
    assert torch.equal(proven.model.weight, before) and proven.num_started == 0
    with pytest.raises(ValueError, match="nothing was received"):
        proven.finish_weight_update()


def test_the_mixin_puts_the_model_back_after_a_failure(proven: Any) -> None:
    model, proven.fails = proven.model, True
    with pytest.raises(RuntimeError, match="broke"):
        proven.receive_weights(update("weight", "bias"))
    assert proven.model is model and proven.checksum == ""
    proven.fails = False
    proven.receive_weights(update("weight", "bias"))
    assert (proven.num_started, proven.num_finished) == (2, 1)  # whole layers before vLLM counts their tensors anew
    proven.finish_weight_update()
    assert proven.checksum == checksum_of(model.state_dict().items())
