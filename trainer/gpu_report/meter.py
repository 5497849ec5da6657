"""Measures one call on a device: its seconds, its peak of memory, and the matrix products a second of the device.

Needs torch alone, for another project's environment uses it too. Knows no model.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainer.gpu_report import workload

Step = Callable[[], Sequence[Tensor]]
CEILING_SIZE = {"cpu": 1536, "cuda": 8192}


def checked(step: Step, path: Path, device: torch.device) -> dict[str, float]:
    """Make a step, save its gradient; seconds, and the peak of bytes over those held before."""
    before = reset_peak(device)
    answer = timed(step, device, path)
    return answer | {"peak_bytes": answer["peak_bytes"] - before}


def timed(step: Step, device: torch.device, path: Path | None = None) -> dict[str, float]:
    """Make a step; its seconds: of this process's CPU time, since others share the cores, or of a GPU's clock."""
    began = clock(device)
    gradient = step()
    seconds, peak_bytes = clock(device) - began, peak(device)
    if path is not None:
        torch.save([one.detach().cpu() for one in gradient], path)
        if stats := getattr(step, "stats", None):
            lines = [one.weight * one.advantage for group in stats for one in group.trajectories]
            path.with_suffix(".json").write_text(json.dumps(lines))
    return {"seconds": seconds, "peak_bytes": float(peak_bytes)}


def ceiling(device: torch.device) -> float:
    """Floating-point operations a second of square matrix products in the model's type."""
    size = CEILING_SIZE[device.type]
    left, right = torch.randn(2, size, size, dtype=workload.dtype_of(device), device=device)
    left @ right
    times = 20 if device.type == "cuda" else 2
    began = clock(device)
    for _ in range(times):
        left @ right
    return float(2 * size**3 * times / (clock(device) - began))


def clock(device: torch.device) -> float:
    """Seconds: of a GPU when its work is done, else of this process's CPU time a thread."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()


def reset_peak(device: torch.device) -> int:
    """Begin a new peak; bytes held now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is held now
    return peak(device)


def peak(device: torch.device) -> int:
    """Largest number of bytes since `reset_peak`: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
