"""Ranks exchange records as msgpack: the same record comes out, and other types are refused. GPUs named by UUID."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import msgspec
import pytest
import torch

from agentrl.config import LearnerConfig
from agentrl.supervision.serving import free_port
from trainer import ranks
from trainer.loop import _num_threads
from trainer.objective import Member
from trainer.orchestrator_client import NoBatch
from trainer.ranks import _decoded, _encoded, hide_uuids


@pytest.mark.parametrize("norms", [None, torch.tensor([1.0, math.inf], dtype=torch.float64)])
@pytest.mark.parametrize("size", [0, 3])
def test_tensors_arrive_to_the_bit(norms: torch.Tensor | None, size: int) -> None:
    ratios = torch.arange(size, dtype=torch.float64) / 3
    member = Member(log_ratio_N=ratios, advantage=0.5, reward=math.nan, group=7, logit_norm2_N=norms)
    ((key, found),) = _decoded(_encoded([((7, 1), member)]), list[tuple[tuple[int, int], Member]])
    assert key == (7, 1) and found.group == 7 and math.isnan(found.reward)
    assert found.log_ratio_N.dtype == torch.float64 and torch.equal(found.log_ratio_N, ratios)
    assert (found.logit_norm2_N is None) if norms is None else torch.equal(found.logit_norm2_N, norms)


@pytest.mark.parametrize("record", [None, 12])
def test_nothing_is_something(record: int | None) -> None:
    assert _decoded(_encoded(record), int | None) == record
    assert _decoded(_encoded(NoBatch.RUN_OVER), str | NoBatch) is NoBatch.RUN_OVER


def test_other_types_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="ranks do not exchange objects of type object"):
        _encoded(object())
    with pytest.raises(msgspec.ValidationError):
        _decoded(_encoded(["a"]), list[int])
    with pytest.raises(ValueError, match="ranks do not exchange a Tensor of uint8"):
        _decoded(msgspec.msgpack.encode(("uint8", [1], b"a")), torch.Tensor)


@pytest.mark.parametrize(
    ("mask", "left"), [(None, None), ("0", "0"), ("3, 1", "3, 1"), ("MIG-5f3a", None), ("0,GPU-8932f937", None)]
)
def test_deepspeed_finds_the_memory_of_a_gpu_that_the_mask_names_by_uuid(
    mask: str | None, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        if left is None:
            with pytest.raises(ValueError, match="invalid literal for int"):
                CUDA_Accelerator._get_nvml_gpu_id(None, 0)
    hide_uuids(os.environ)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == left
    assert CUDA_Accelerator._get_nvml_gpu_id(None, 0) == (0 if left is None else int(left[0]))


TWO_RANKS = """
import os, sys
from trainer import ranks
from trainer.process_end import end_process
ranks.set_defaults(os.environ)
ranks.join(timeout_s=60)
ranks.BROADCAST_BYTES = 1000
whole = list(range(5000))
for record in (whole, [], whole):
    assert ranks.of_first(record if ranks.is_first() else [-1], list[int]) == record
assert ranks.gather([ranks.index()], int) == [0, 1]
assert ranks.on_this_machine() == 2
ranks.leave()
end_process()
"""


def test_the_first_ranks_record_arrives_in_pieces_on_two_ranks() -> None:
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen([sys.executable, "-c", TWO_RANKS], env={**env, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]
    try:
        assert [process.wait(timeout=100) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize(("settings", "is_share"), [({}, False), ({"offload_optimizer": True}, True)])
def test_a_step_on_the_cpu_uses_the_cores_of_the_machine(settings: dict[str, bool], is_share: bool) -> None:
    ranks.set_defaults(os.environ)
    ranks.join(timeout_s=60)
    assert _num_threads(LearnerConfig(**settings)) == (len(os.sched_getaffinity(0)) if is_share else 1)
    assert _num_threads(LearnerConfig(num_threads=3, **settings)) == 3
