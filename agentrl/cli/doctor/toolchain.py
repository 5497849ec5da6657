"""Doctor's checks of what the CUDA build needs beside its packages, on this machine.

Driver, C compiler, Python's headers and ninja: vLLM and the learner compile Triton kernels when they start. Compute
mode, MPS and WSL2: whether two processes may share a GPU. Receives what was read; nothing here loads CUDA.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.cli.doctor.findings import Finding, fail, ok, warn
from agentrl.cli.doctor.machine import Gpu

MIN_DRIVER = 580
"""The branch of NVIDIA's driver that CUDA 13, the CUDA of torch and vLLM in lock-gpu.txt, needs."""
NEW_DRIVER = (
    "install a newer one (Ubuntu: `sudo apt-get install -y nvidia-driver-580-server`; WSL2: Windows' driver; "
    "else https://www.nvidia.com/drivers), or take the CPU build: `AGENTRL_BUILD=cpu make setup`"
)
CUDA_BIN = "/usr/local/cuda/bin"
NEEDS_NVCC = "10."
"""Compute capabilities for which vLLM takes FlashInfer's attention, which is compiled with nvcc at the first start."""
DEFAULT_MODE = "`sudo nvidia-smi -c DEFAULT`"
END_MPS = "end it (`echo quit | nvidia-cuda-mps-control`), or set engine.weight_transfer=safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """What is there to compile with. Example: `read_toolchain(os.environ).compiler == "/usr/bin/gcc"`."""

    compiler: str | None
    header: Path
    """Where Python.h belongs."""
    has_header: bool
    ninja: str | None
    nvcc: str | None
    installer: str | None
    """`apt-get` or `dnf`."""


def read_toolchain(environ: Mapping[str, str]) -> Toolchain:
    """What this machine has, found as Triton finds it: `CC`, else gcc, else clang."""
    own = str(Path(sys.executable).parent)
    path = environ.get("PATH", os.defpath)
    header = Path(sysconfig.get_paths("posix_prefix")["include"]) / "Python.h"
    toolkits = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    names = [environ["CC"]] if environ.get("CC") else ["gcc", "clang"]
    return Toolchain(
        compiler=next((found for name in names if (found := shutil.which(name, path=path))), None),
        header=header,
        has_header=header.is_file(),
        ninja=shutil.which("ninja", path=f"{own}{os.pathsep}{path}"),
        nvcc=shutil.which("nvcc", path=os.pathsep.join((*(f"{root}/bin" for root in toolkits), path, CUDA_BIN))),
        installer=next((name for name in ("apt-get", "dnf") if shutil.which(name, path=path)), None),
    )


def driver(found: Sequence[Gpu]) -> list[Finding]:
    """Whether the driver is new enough for the CUDA build; nothing without a GPU."""
    if not found:
        return []
    version = found[0].driver
    branch = version.partition(".")[0]
    if not branch.isdigit():
        return [warn("driver", f"its version is not known: {version}", f"check that it is {MIN_DRIVER} or newer")]
    if int(branch) < MIN_DRIVER:
        return [fail("driver", f"{version}; the CUDA build needs branch {MIN_DRIVER} or newer", NEW_DRIVER)]
    return [ok("driver", f"{version}, branch {MIN_DRIVER} or newer")]


def compiler(tools: Toolchain, found: Sequence[Gpu], *, has_gpu: bool) -> Finding:
    """Whether Triton and FlashInfer can compile. WARN without a GPU: the CUDA build is installed for other machines."""
    name, version = "compiler", f"{sys.version_info.major}.{sys.version_info.minor}"
    wanted = {
        "a C compiler (gcc)": (tools.compiler is not None, "gcc libc6-dev", "gcc"),
        str(tools.header): (tools.has_header, f"python{version}-dev", f"python{version}-devel"),
    }
    missing = {what: packages for what, (there, *packages) in wanted.items() if not there}
    if missing:
        is_dnf = tools.installer == "dnf"
        fix = f"sudo {tools.installer or 'apt-get'} install -y {' '.join(two[is_dnf] for two in missing.values())}"
        said = f"missing: {', '.join(missing)}; Triton compiles with them when a run starts"
        return (fail if has_gpu else warn)(name, said, f"`{fix}`")
    if tools.nvcc is None and any(gpu.capability.startswith(NEEDS_NVCC) for gpu in found):
        said = "no nvcc: on this GPU vLLM's attention is FlashInfer's, which compiles with it"
        return warn(name, said, "install NVIDIA's CUDA toolkit 13 and put its bin/ on PATH")
    if tools.ninja is None:
        return warn(name, f"{tools.compiler}, no ninja: vLLM switches FlashInfer off", "`make setup` installs it")
    return ok(name, f"{tools.compiler}, Python.h, {tools.ninja}")


def sharing(found: Sequence[Gpu], *, mps: bool, wsl: bool) -> list[Finding]:
    """What keeps processes off a GPU, or from using one together; nothing without a GPU.

    That learner and engine of a config would share a GPU which one process alone may use is placement's finding.
    """
    if not found:
        return []
    name, findings = "GPU sharing", []
    modes = ", ".join(f"GPU {at}: {gpu.compute_mode}" for at, gpu in enumerate(found) if gpu.compute_mode != "Default")
    if "Prohibited" in modes:
        findings.append(fail(name, f"{modes}: no process may use it", DEFAULT_MODE))
    elif modes and not mps:
        findings.append(warn(name, f"{modes}: learner and engine cannot share it", DEFAULT_MODE))
    if mps:
        said = "an MPS server runs: CUDA IPC (weights on one GPU) may fail, and a client that dies stops the others"
        findings.append(warn(name, said, END_MPS))
    if wsl:
        findings.append(ok(name, "WSL2 has no CUDA IPC: weights travel as safetensors"))
    return findings
