"""What tests would run on where a GPU is: the machine and the CUDA build are pretended."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config import EngineConfig
from agentrl.engine import vllm_command
from tests import device, workers
from tests.agentrl.conftest import pretend_gpus


@pytest.fixture
def a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With the CUDA build of vLLM."""
    pretend_gpus(monkeypatch, 1)
    device.engine_device.cache_clear()
    yield
    monkeypatch.undo()
    device.engine_device.cache_clear()


@pytest.mark.usefixtures("a_gpu_machine")
def test_engines_of_tests_are_gpu_engines_where_vllm_is_the_cuda_build() -> None:
    config = EngineConfig(**device.engine_settings(stream_interval=1))
    assert (config.device, config.stream_interval) == ("cuda", 1)
    argv, env = vllm_command.command(
        model_path="models/some",
        served_name="policy",
        host="127.0.0.1",
        port=8000,
        config=config,
        max_context=1024,
        dtype="float32",
        seed=0,
    )
    pairs = dict(itertools.pairwise(argv))
    assert pairs["--gpu-memory-utilization"] == str(device.GPU_MEMORY_FRACTION)
    assert "--enforce-eager" not in argv and "OMP_NUM_THREADS" not in env
    assert device.parity_bound() > 1e-4
    mark = device.cpu_engine_only("gloo is for CPUs")
    assert mark.args == (True,) and "gloo is for CPUs" in mark.kwargs["reason"]


@pytest.mark.parametrize(
    ("needed", "markexpr", "there", "said"),
    [
        ({}, "gpu", 1, ""),
        ({}, "gpu and not slow", 8, ""),
        ({"num_gpus": 2}, "gpu", 1, r"needs 2 NVIDIA GPU"),
        ({}, "gpu", 0, r"needs 1 NVIDIA GPU"),
        ({}, "not slow and not soak", 1, r"`pytest -m gpu`"),
        ({}, "not gpu", 1, r"`pytest -m gpu`"),
    ],
)
def test_a_gpu_test_says_why_it_does_not_run(needed: dict[str, int], markexpr: str, there: int, said: str) -> None:
    reason = device.why_not(pytest.mark.gpu(**needed).mark, markexpr=markexpr, there=there)
    assert (said in reason) if said else reason == ""


def test_on_a_gpu_machine_one_worker_starts_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [path for path in Path(__file__).parent.rglob("test_*.py") if "pytest.mark.e2e" in path.read_text()]
    files = [path for path in files if "pytest.mark.docker" not in path.read_text()]
    monkeypatch.setattr(workers, "HAS_GPU", False)
    assert len({workers.group_of.__wrapped__(path) for path in files}) > 1
    monkeypatch.setattr(workers, "HAS_GPU", True)
    assert {workers.group_of.__wrapped__(path) for path in files} == {"engine"}


def test_no_test_names_the_cpu_where_it_starts_an_engine() -> None:
    """An engine of a CUDA build refuses `device="cpu"`: fixtures take `engine_settings`."""
    tests = Path(__file__).parent
    starting = [path for path in tests.rglob("*.py") if "pytest.mark.engine" in path.read_text()]
    assert len(starting) > 10
    fakes = ("test_vllm_server.py", "test_cells.py", Path(__file__).name)
    named = ('device="cpu"', '"device": "cpu"', "engine.device=cpu")
    wrong = [path.name for path in starting if path.name not in fakes and any(n in path.read_text() for n in named)]
    assert wrong == []
