"""Who uses which GPU, and how weights travel: a table of machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Config, EngineConfig, LearnerConfig, load
from agentrl.engine.gpus import MachineGpu, visible
from agentrl.engine.placement import Placement, place, place_engine
from agentrl.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
GIB = 2**30
UUIDS = tuple(f"GPU-{name}0000000-0000" for name in "abcdefgh")
MIG = ("MIG-11111111-0000", "MIG-22222222-0000")
TP2 = {"tensor_parallel": 2}


def machine(num_gpus: int) -> list[MachineGpu]:
    return [MachineGpu(uuid=uuid, total_bytes=80 * GIB) for uuid in UUIDS[:num_gpus]]


def placed(
    num_gpus: int, mask: str | None, num_ranks: int, engine: dict[str, Any], **learner: Any
) -> tuple[Placement, str, list[str]]:
    """(placement, mask of the learner, masks of the engines)."""
    settings = LearnerConfig(num_ranks=num_ranks, **learner)
    here = visible(machine(num_gpus), mask)
    placement = place(EngineConfig.model_validate(engine), settings, visible=here, device="cuda")
    engines = [placement.engine_environment(at)["CUDA_VISIBLE_DEVICES"] for at in range(len(placement.engines))]
    return placement, placement.learner_environment().get("CUDA_VISIBLE_DEVICES", ""), engines


@pytest.mark.parametrize(
    ("num_gpus", "mask", "num_ranks", "engine", "learner_mask", "engine_masks", "transfer"),
    [
        # GPUs, mask, ranks, engine -> masks of learner and engines, transfer
        (1, None, 1, {}, "0", ["0"], "ipc"),
        (2, None, 1, {}, "0", ["1"], "nccl"),
        (4, None, 1, {}, "0", ["1"], "nccl"),
        (8, None, 4, {}, "0,1,2,3", ["4"], "nccl"),
        # several engines, tensor parallel
        (4, None, 2, TP2, "0,1", ["2,3"], "nccl"),
        (8, None, 4, TP2 | {"replicas": 2}, "0,1,2,3", ["4,5", "6,7"], "nccl"),
        (8, None, 5, {"replicas": 3}, "0,1,2,3,4", ["5", "6", "7"], "nccl"),
        (8, None, 4, {"replicas": 4, "update_order": "rolling"}, "0,1,2,3", ["4", "5", "6", "7"], "safetensors"),
        # engine.gpus indexes the visible list; ranks take the others
        (2, None, 1, {"gpus": [0]}, "1", ["0"], "nccl"),
        (8, None, 4, {"gpus": [0, 2, 4, 6], "replicas": 4}, "1,3,5,7", ["0", "2", "4", "6"], "nccl"),
        (8, "4,5,6,7", 2, {"gpus": [2, 3]} | TP2, "4,5", ["6,7"], "nccl"),
        (8, "7,6", 1, {"gpus": [0]}, "6", ["7"], "nccl"),
        # masks
        (8, "3", 1, {}, "3", ["3"], "ipc"),
        (8, "6,2", 1, {}, "6", ["2"], "nccl"),
        (8, " 6 , 2 ", 1, {}, "6", ["2"], "nccl"),
        (8, "1,-1,2", 1, {}, "1", ["1"], "ipc"),  # CUDA ignores what follows an entry that names no GPU
        (2, "1,5", 1, {}, "1", ["1"], "ipc"),
        (4, UUIDS[3], 1, {}, "3", ["3"], "ipc"),
        (4, f"{UUIDS[3]},{UUIDS[1]}", 1, {}, "3", ["1"], "nccl"),
        (4, "GPU-d,GPU-b", 1, {}, "3", ["1"], "nccl"),  # a unique beginning is enough
        (4, "GPU-d,1", 1, {}, UUIDS[3], ["1"], "nccl"),  # a number in CUDA's own order stays as it is
        # sharing that was asked for
        (2, None, 2, {"gpus": [0]}, "0,1", ["0"], "ipc"),
        (2, None, 2, {"gpus": [1]}, "0,1", ["1"], "safetensors"),  # rank 0 sends, and is elsewhere
        (2, None, 2, {"gpus": [0, 1]} | TP2, "0,1", ["0,1"], "safetensors"),
        (1, None, 1, {"weight_transfer": "safetensors"}, "0", ["0"], "safetensors"),
        (1, None, 1, {"weight_transfer": "reload"}, "0", ["0"], "reload"),
        (1, None, 1, {"host": "0.0.0.0"}, "0", ["0"], "safetensors"),  # no pickles from the network
        (2, None, 1, {"weight_delta": 8}, "0", ["1"], "safetensors"),  # nccl sends all weights
        # engines elsewhere
        (2, None, 2, {"url": "http://a:1"}, "0,1", [], "safetensors"),
        (1, None, 1, {"url": "http://a:1", "weight_transfer": "nccl"}, "0", [], "nccl"),
        (4, None, 1, {"url": ["http://a:1", "http://b:1"], "gpus": [0, 1, 2, 3]}, "0", [], "safetensors"),
    ],
)
def test_a_machine(
    num_gpus: int,
    mask: str | None,
    num_ranks: int,
    engine: dict[str, Any],
    learner_mask: str,
    engine_masks: list[str],
    transfer: str,
) -> None:
    placement, learner, engines = placed(num_gpus, mask, num_ranks, engine)
    assert (learner, engines, placement.transfer) == (learner_mask, engine_masks, transfer)
    rank_gpus, engine_gpus = set(learner.split(",")), {gpu for one in engines for gpu in one.split(",")}
    assert placement.is_shared == bool(rank_gpus & engine_gpus)
    assert not (placement.is_shared and placement.transfer == "nccl")


@pytest.mark.parametrize(
    ("num_gpus", "mask", "num_ranks", "engine", "message"),
    [
        # too few: what there is, what was asked, what would fit
        (1, None, 2, {}, r"needs 3 GPUs \(learner.num_ranks=2, engine.replicas=1 of .*sees 1 GPU \(0\): set"),
        (2, None, 2, {}, r"needs 3 GPUs .*sees 2 GPUs: set learner.num_ranks=1$"),
        (8, None, 6, {"replicas": 4}, r"needs 10 GPUs .*set learner.num_ranks=4"),
        (2, None, 1, {"replicas": 2}, r"engines have room for 1 in all: lower engine.replicas"),
        (2, None, 1, TP2, r"engine.tensor_parallel=2\).*room for 1 in all"),
        (8, "0,1", 4, {}, r"sees 2 GPUs \(CUDA_VISIBLE_DEVICES='0,1'\): set learner.num_ranks=1"),
        (8, "", 1, {}, r"sees no GPU \(CUDA_VISIBLE_DEVICES=''\): unset"),
        (8, "NoDevFiles", 1, {}, "sees no GPU"),
        (0, None, 1, {}, "sees no GPU: unset CUDA_VISIBLE_DEVICES, or start"),
        (1, None, 2, {"url": "http://a:1"}, r"needs 2 GPUs \(learner.num_ranks=2\)"),
        # engine.gpus
        (
            2,
            None,
            1,
            {"gpus": [2]},
            r"engine.gpus=\[2\] counts the visible GPUs .*sees 2 GPUs: there is no GPU 2",
        ),
        (8, "4,5", 1, {"gpus": [4]}, r"CUDA_VISIBLE_DEVICES='4,5'\): there is no GPU 4"),
        # a transfer that cannot work there
        (1, None, 1, {"weight_transfer": "nccl"}, r"nccl joins different GPUs.*share one.*use ipc.*2 must be visible"),
        (2, None, 1, {"weight_transfer": "ipc"}, r"rank 0 on one GPU.*gpus=\[0\] with CUDA_VISIBLE_DEVICES=0$"),
        (2, None, 2, {"weight_transfer": "ipc", "gpus": [1]}, r"rank 0 on one GPU.*gpus=\[0\]$"),
        (1, None, 1, {"weight_transfer": "ipc", "host": "0.0.0.0"}, r"unpickle.*127\.0\.0\.1"),
        (2, None, 1, {"weight_transfer": "gloo"}, "is for CPUs"),
        # masks that CUDA would not take
        (2, "0,0", 1, {}, "names GPU 0 twice"),
        (2, "GPU-a,GPU-a0", 1, {}, "names GPU GPU-a0 twice"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(
    num_gpus: int, mask: str | None, num_ranks: int, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(num_gpus, mask, num_ranks, engine)


def test_parameters_that_zero_releases_are_not_shared() -> None:
    assert placed(1, None, 1, {}, zero_stage=3)[0].transfer == "safetensors"
    with pytest.raises(ConfigError, match="zero_stage=3 releases it layer by layer: use safetensors"):
        placed(1, None, 1, {"weight_transfer": "ipc"}, zero_stage=3)


def test_a_gpu_for_one_process_is_not_shared() -> None:
    def on(num_gpus: int) -> Placement:
        here = visible([MachineGpu(uuid=uuid, is_exclusive=True) for uuid in UUIDS[:num_gpus]], None)
        return place(EngineConfig(), LearnerConfig(), visible=here, device="cuda")

    assert on(2).transfer == "nccl"
    with pytest.raises(ConfigError, match=r"Exclusive_Process.*nvidia-smi -c DEFAULT"):
        on(1)


MIG_MACHINE = [MachineGpu(uuid=UUIDS[0], is_split=True, instances=MIG), MachineGpu(uuid=UUIDS[1], total_bytes=GIB)]


@pytest.mark.parametrize(
    ("mask", "learner_mask", "engine_mask"),
    [
        (None, MIG[0], MIG[1]),
        (MIG[1], MIG[1], MIG[1]),
        (f"{MIG[1]},{MIG[0]}", MIG[1], MIG[0]),
        (f"{UUIDS[1]},{MIG[0]}", UUIDS[1], MIG[0]),
    ],
)
def test_mig_instances_take_weights_through_a_folder(mask: str | None, learner_mask: str, engine_mask: str) -> None:
    here = visible(MIG_MACHINE, mask)
    placement = place(EngineConfig(), LearnerConfig(), visible=here, device="cuda")
    assert placement.learner_environment()["CUDA_VISIBLE_DEVICES"] == learner_mask
    assert placement.engine_environment()["CUDA_VISIBLE_DEVICES"] == engine_mask
    assert placement.transfer == "safetensors"


@pytest.mark.parametrize(
    ("num_ranks", "engine", "message"),
    [
        (2, {}, "learner.num_ranks > 1 on MIG instances"),
        (1, {"tensor_parallel": 2}, "engine.tensor_parallel > 1 on MIG instances"),
        (1, {"weight_transfer": "nccl"}, "nccl cannot join MIG instances: use safetensors"),
    ],
)
def test_mig_instances_are_not_joined(num_ranks: int, engine: dict[str, Any], message: str) -> None:
    here = visible([*MIG_MACHINE, *machine(4)[2:]], None)
    learner = LearnerConfig(num_ranks=num_ranks)
    with pytest.raises(ConfigError, match=message):
        place(EngineConfig.model_validate(engine), learner, visible=here, device="cuda")


@pytest.mark.parametrize(
    ("num_gpus", "mask", "engine", "expected"),
    [
        # two nodes of `slots=4`: DeepSpeed's launcher gives the ranks GPUs 0 to 3 of each
        (8, None, {"replicas": 4}, "learner on GPU 0,1,2,3; engine-0 on GPU 4; engine-1 on GPU 5; engine-2 on GPU 6; "),
        (8, None, {"gpus": [4, 5, 6, 7]} | {"tensor_parallel": 4}, "engine on GPU 4,5,6,7; weights by nccl"),
        (8, None, {"gpus": [0]}, "engine on GPU 0; GPU 4,5,6,7 idle; they share a GPU; weights by ipc"),
        (4, None, {"url": "http://a:1"}, "learner on GPU 0,1,2,3; weights by safetensors"),
        (4, None, {}, "needs 5 GPUs"),
        (8, "4,5,6,7", {"url": "http://a:1"}, "ignores CUDA_VISIBLE_DEVICES=4,5,6,7: unset it"),
    ],
)
def test_the_first_of_two_nodes(num_gpus: int, mask: str | None, engine: dict[str, Any], expected: str) -> None:
    learner = LearnerConfig(num_ranks=8, hostfile="hostfile")

    def first_node() -> Placement:
        here = visible(machine(num_gpus), mask)
        return place(EngineConfig.model_validate(engine), learner, visible=here, device="cuda", num_ranks=4)

    if "needs" in expected or "ignores" in expected:
        with pytest.raises(ConfigError, match=expected):
            first_node()
        return
    placement = first_node()
    assert expected in str(placement)
    assert placement.learner_environment() == {}  # the launcher sets it


def run(name: str) -> Config:
    return load(CONFIGS / f"{name}.yaml")


@pytest.mark.parametrize(
    ("name", "num_gpus", "found"),
    [
        ("quickstart", 1, "learner on GPU 0; engine on GPU 0; they share a GPU; weights by ipc"),
        ("quickstart", 2, "learner on GPU 0; engine on GPU 1; weights by nccl"),
        ("quickstart", 8, "learner on GPU 0; engine on GPU 1; GPU 2,3,4,5,6,7 idle; weights by nccl"),
        ("aime_1gpu", 1, "learner on GPU 0; engine on GPU 0; they share a GPU; weights by ipc"),
        ("aime_1gpu", 2, "learner on GPU 0; engine on GPU 1; weights by nccl"),
        ("aime_8gpu", 4, "needs 8 GPUs .*sees 4 GPUs"),
        ("aime_8gpu", 1, "needs 8 GPUs"),
    ],
)
def test_a_shipped_config_on_its_machine_and_on_others(name: str, num_gpus: int, found: str) -> None:
    config = run(name)
    here = visible(machine(num_gpus), None)
    if "needs" in found:
        with pytest.raises(ConfigError, match=found):
            place(config.engine, config.learner, visible=here, device="cuda")
    else:
        assert str(place(config.engine, config.learner, visible=here, device="cuda")) == found


def test_the_config_for_eight_gpus_uses_all_of_them_once() -> None:
    config = run("aime_8gpu")
    placement = place(config.engine, config.learner, visible=visible(machine(8), None), device="cuda")
    assert placement.used == tuple(range(8)) and not placement.is_shared
    assert len(placement.engines) == config.engine.replicas


def test_the_cluster_s_engine_machines_run_two_servers_each() -> None:
    config = run("cluster/aime")
    here = visible(machine(8), None)
    both = [config.engine.model_copy(update={"gpus": gpus}) for gpus in ((0, 1, 2, 3), (4, 5, 6, 7))]
    masks = [place_engine(one, visible=here, device="cuda").engine_environment() for one in both]
    assert [mask["CUDA_VISIBLE_DEVICES"] for mask in masks] == ["0,1,2,3", "4,5,6,7"]


def test_on_a_cpu_no_environment_changes() -> None:
    placement = place(EngineConfig(replicas=2), LearnerConfig(num_ranks=2), visible=visible([], None), device="cpu")
    assert (placement.learner_environment(), placement.engine_environment(1)) == ({}, {})
    assert str(placement) == "no GPU used here; weights by safetensors"
    for transfer in ("nccl", "ipc"):
        with pytest.raises(ConfigError, match="needs NVIDIA GPUs"):
            engine = EngineConfig.model_validate({"weight_transfer": transfer})
            place(engine, LearnerConfig(), visible=visible([], None), device="cpu")


def test_the_memory_of_the_engine_s_smallest_gpu_is_known() -> None:
    assert placed(2, None, 1, {})[0].engine_gpu_bytes == 80 * GIB
    here = visible(MIG_MACHINE, None)
    assert place(EngineConfig(), LearnerConfig(), visible=here, device="cuda").engine_gpu_bytes is None
