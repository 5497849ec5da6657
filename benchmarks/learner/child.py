"""One method in its own process, which makes a step on request and answers on standard output.

Peak memory is that of this process, over what it held before its first step. `trl_step.py` uses the same protocol in
another environment: nothing here but torch is needed until a method is made.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.gpu_report import meter, workload
from trainer.gpu_report.meter import Step

Make = Callable[[Any, Sequence[workload.Sample]], Step]
SMALL_TOKENS = 32  # of each trajectory of the step that loads code


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
                answer = meter.checked(step, Path(path), device)
            case "time":
                answer = meter.timed(step, device)
            case "ceiling":
                answer = {"flops_per_s": meter.ceiling(device)}
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


def _shortened(sample: workload.Sample) -> workload.Sample:
    """Its end: prompt and actions are both there."""
    fields = workload.vars_of(sample)
    cut = {name: fields[name][-SMALL_TOKENS:].clone() for name in ("ids_T", "acted_T", "behavior_T")}
    cut["acted_T"][:2], cut["behavior_T"][:2] = False, 0
    cut["acted_T"][2:], cut["behavior_T"][2:] = True, -1
    return workload.Sample(**fields | cut)


if __name__ == "__main__":
    from benchmarks.learner import engine_steps
    from trainer.gpu_report import methods

    made = engine_steps.make if sys.argv[-1] in engine_steps.SETTINGS else methods.make
    main(lambda model, samples: made(sys.argv[-1], model, samples), __doc__)
