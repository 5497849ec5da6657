"""One method in its own process, which makes a step on request and answers on standard output.

Peak memory is that of this process, over what it held before its first step. `trl_step.py` uses the same protocol in
another environment: nothing here but torch is needed until a method is made.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.learner import workload

Step = Callable[[], Sequence[Tensor]]
Make = Callable[[Any, Sequence[workload.Sample]], Step]
SMALL_TOKENS = 32  # of each trajectory of the step that loads code
CEILING_SIZE = {"cpu": 1536, "cuda": 8192}


def main(make: Make, description: str | None) -> None:
    """Serve `make`'s steps.

    Lines `load FOLDER`, `check FILE`, `time` or `ceiling` on standard input, a JSON line in answer to each.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    options, _ = parser.parse_known_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    step: Step = list
    for line in sys.stdin:
        command, _, path = line.strip().partition(" ")
        answer: dict[str, float] = {}
        match command:
            case "load":
                step = list  # the cell before is forgotten first
                step = loaded(make, Path(path), device)
            case "check":
                answer = checked(step, Path(path), device)
            case "time":
                answer = timed(step, device)
            case "ceiling":
                answer = {"flops_per_s": ceiling(device)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # other methods' processes need the memory


def loaded(make: Make, folder: Path, device: torch.device) -> Step:
    """The method on what lies in the folder, after a small step that loads what code it needs."""
    model, samples = workload.load_model(folder, device), workload.load(folder)
    make(model, [_shortened(sample) for sample in samples])()
    model.zero_grad(set_to_none=True)
    return make(model, samples)


def checked(step: Step, path: Path, device: torch.device) -> dict[str, float]:
    """Make a step, save its gradient; seconds, and the peak of bytes over those held before."""
    before = _reset_peak(device)
    answer = timed(step, device, path)
    return answer | {"peak_bytes": answer["peak_bytes"] - before}


def timed(step: Step, device: torch.device, path: Path | None = None) -> dict[str, float]:
    """Make a step; its seconds: of this process's CPU time, since others share the cores, or of a GPU's clock."""
    began = _clock(device)
    gradient = step()
    seconds, peak_bytes = _clock(device) - began, _peak(device)
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
    began = _clock(device)
    for _ in range(times):
        left @ right
    return float(2 * size**3 * times / (_clock(device) - began))


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()


def _shortened(sample: workload.Sample) -> workload.Sample:
    """Its end: prompt and actions are both there."""
    fields = workload.vars_of(sample)
    cut = {name: fields[name][-SMALL_TOKENS:].clone() for name in ("ids_T", "acted_T", "behavior_T")}
    cut["acted_T"][:2], cut["behavior_T"][:2] = False, 0
    cut["acted_T"][2:], cut["behavior_T"][2:] = True, -1
    return workload.Sample(**fields | cut)


def _reset_peak(device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is held now
    return _peak(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    from benchmarks.learner import methods

    main(lambda model, samples: methods.make(sys.argv[-1], model, samples), __doc__)
