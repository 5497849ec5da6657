"""Which GPUs a process sees: what nvidia-smi lists, what CUDA_VISIBLE_DEVICES leaves of it, and machines without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.engine import gpus
from agentrl.engine.gpus import BY_BUS, MASK, ORDER, MachineGpu, device_files, machine_gpus, read_machine, visible

QUERIED = """\
GPU-aaaaaaaa-1111-2222-3333-444444444444, 81559, Enabled, Default
GPU-bbbbbbbb-1111-2222-3333-444444444444, 81559, Disabled, Exclusive_Process
GPU-cccccccc-1111-2222-3333-444444444444, [N/A], [N/A], Default
"""
LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaaaaaa-1111-2222-3333-444444444444)
  MIG 3g.40gb     Device  0: (UUID: MIG-dddddddd-1111-2222-3333-444444444444)
  MIG 3g.40gb     Device  1: (UUID: MIG-eeeeeeee-1111-2222-3333-444444444444)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbbbbbb-1111-2222-3333-444444444444)
GPU 2: NVIDIA GB10 (UUID: GPU-cccccccc-1111-2222-3333-444444444444)
"""


def program(folder: Path, text: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{text}")
    path.chmod(0o755)
    return str(path)


def test_gpus_and_mig_instances_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = program(tmp_path, f"print({LISTED!r} if '-L' in sys.argv else {QUERIED!r}, end='')")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    split, whole, shared = read_machine(smi)
    assert [uuid[:12] for uuid in split.instances] == ["MIG-dddddddd", "MIG-eeeeeeee"]
    assert split.is_split and not whole.is_split
    assert (whole.total_bytes, shared.total_bytes) == (81559 * 2**20, None)
    found = visible([split, whole, shared], None).gpus
    assert [gpu.entry[:12] for gpu in found] == ["MIG-dddddddd", "MIG-eeeeeeee", "GPU-bbbbbbbb", "GPU-cccccccc"]
    assert [gpu.is_mig for gpu in found] == [True, True, False, False]
    assert [gpu.is_exclusive for gpu in found] == [False, False, True, False]
    (tmp_path / "control").touch()  # an MPS server shares it
    assert not any(gpu.is_exclusive for gpu in read_machine(smi))


@pytest.mark.parametrize("text", ["print('no driver'); sys.exit(9)", "time.sleep(60)", "print('garbage')"])
def test_an_nvidia_smi_that_fails_hangs_or_prints_nonsense_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(Exception, match=r"no driver|timed out|not enough values"):
        read_machine(program(tmp_path, text), timeout_s=5 if "sleep" not in text else 0.5)


def test_without_nvidia_smi_device_files_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert len(device_files(tmp_path)) == 2
    monkeypatch.setattr(gpus, "device_files", lambda: (MachineGpu(),))
    monkeypatch.setattr(gpus, "WSL_SMI", "")
    monkeypatch.setenv("PATH", "")
    assert len(machine_gpus.__wrapped__()) == 1
    program(tmp_path, "print('mismatch'); sys.exit(18)")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert len(machine_gpus.__wrapped__()) == 1
    assert "nvidia-smi does not list the GPUs (exit code 18: mismatch)" in caplog.text


def test_uuids_that_cannot_be_looked_up_stay() -> None:
    found = visible([MachineGpu(), MachineGpu()], "GPU-12345,GPU-6789")
    assert [gpu.entry for gpu in found.gpus] == ["GPU-12345", "GPU-6789"]


@pytest.mark.parametrize(
    ("mask", "order", "sets_order"),
    [(None, None, True), ("1,0", None, False), ("1,0", BY_BUS, True), ("GPU-b,GPU-a", None, True)],
)
def test_numbers_of_nvidia_smi_come_with_its_order(mask: str | None, order: str | None, sets_order: bool) -> None:
    found = visible([MachineGpu(uuid="GPU-aa"), MachineGpu(uuid="GPU-bb")], mask, order=order)
    first = found.gpus[0].entry
    assert found.environment([first]) == {MASK: first} | ({ORDER: BY_BUS} if sets_order else {})
