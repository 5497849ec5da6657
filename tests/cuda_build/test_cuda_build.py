"""The record of the CUDA build is as new as the lock and the flags; where the build is there it is checked again."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.cuda_build import check
from tests.cuda_build.command_lines import arguments, command_lines

RENEW = "`make check-cuda` renews tests/cuda_build/record.json"


@pytest.fixture
def record() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(check.RECORD.read_text())
    return loaded


def test_the_record_is_of_the_present_lock(record: dict[str, Any]) -> None:
    assert record["lock"] == check.lock_hash(), f"requirements/lock-gpu.txt changed: {RENEW}"


def test_every_flag_that_we_pass_was_parsed_by_the_cuda_build(record: dict[str, Any]) -> None:
    now, parsed = arguments(list(command_lines())), record["arguments"]
    new = {flag: values for flag, values in now.items() if flag not in parsed or set(values) - set(parsed[flag])}
    assert not new, f"vLLM's CUDA build has not parsed these: {RENEW}"


def test_command_lines_are_those_of_one_gpu_and_of_several() -> None:
    lines = {line.name: line.argv for line in command_lines()}
    names = {f"quickstart, {rest}" for rest in ("1 GPU, ipc", "1 GPU, ipc, sleeping", "8 GPUs, nccl")}
    assert names | {"aime_1gpu, 1 GPU, ipc", "aime_8gpu, 8 GPUs, safetensors", "aime, 8 GPUs, safetensors"} <= set(
        lines
    )
    assert "quickstart, 1 GPU, nccl" not in lines  # NCCL joins two GPUs
    shared, alone = lines["quickstart, 1 GPU, ipc"], lines["quickstart, 8 GPUs, nccl"]
    assert "--kv-cache-memory-bytes" in shared and "--kv-cache-memory-bytes" not in alone


def test_arguments_hold_what_vllm_must_understand_and_no_number() -> None:
    found = arguments(list(command_lines()))
    assert found["--dtype"] == ["bfloat16", "float32"] and found["--max-model-len"] == []
    assert "AGENTRL_ENGINE_TOKEN" in found and "token" not in str(found.values())


@pytest.mark.slow
@pytest.mark.cuda_build
@pytest.mark.timeout(900)
def test_the_cuda_build_loads_and_takes_our_command_lines(record: dict[str, Any]) -> None:
    if not check.is_installed():
        pytest.skip(f"no CUDA build in {check.environment()}: `make check-cuda` installs it (4 GB to load)")
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile libcuda.c with")
    check.install()
    found = check.probe()
    assert found["versions"] == record["versions"]
    wanted = [line.name for line in command_lines()]
    assert list(found["resolved"]) == wanted
    for name, chosen in found["resolved"].items():
        assert chosen["device"] == "cuda" and chosen["logprobs"] == "processed_logprobs", name
        assert chosen["dtype"] == ("torch.float32" if name.startswith("quickstart") else "torch.bfloat16"), name
        assert chosen["head_dtype"] == "torch.float32", name
    assert check.contract_tests() > 40
