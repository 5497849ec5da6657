"""Makes vLLM's CPU build run as it does on a GPU: AsyncScheduler with a batch queue of 2, and Model Runner V2.

`register` is a plugin of vLLM; `sitecustomize` comes before vLLM is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ASYNC_MARK = "AsyncScheduler with a batch queue of 2"
V2_MARK = "Using V2 Model Runner"
ENTRY_POINTS = f"[vllm.general_plugins]\ngpu_scheduling = {__name__}:register\n"


def register() -> None:
    """Called by vLLM in each of its processes. vLLM switches asynchronous scheduling off on a CPU."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    check: Any = CpuPlatform.check_and_update_config.__func__
    make_scheduler = AsyncScheduler.__init__

    def checked(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    def scheduler(self: Any, *args: Any, **options: Any) -> None:
        make_scheduler(self, *args, **options)
        sys.stderr.write(f"AsyncScheduler with a batch queue of {self.vllm_config.max_concurrent_batches}\n")

    CpuPlatform.check_and_update_config = classmethod(checked)
    AsyncScheduler.__init__ = scheduler


def interpret_triton() -> None:
    """Let vLLM believe that Triton has a CPU backend: Model Runner V2 needs one. The kernels run in Triton's own
    interpreter, which computes on the tensors of the CPU."""
    from types import SimpleNamespace

    from triton.backends import backends  # type: ignore[import-untyped]

    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def environment(folder: Path) -> dict[str, str]:
    """Variables of a server that runs so; files for it are written into `folder`."""
    installed = folder / "gpu_scheduling-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: gpu-scheduling\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS)
    root = str(Path(__file__).parents[3])
    paths = [str(folder), root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    (folder / "sitecustomize.py").write_text(f"from {__name__} import interpret_triton\n\ninterpret_triton()\n")
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
