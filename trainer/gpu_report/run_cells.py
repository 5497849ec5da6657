"""Cells of whole commands: `agentrl train`, synchronous and asynchronous, and the tests that need a GPU."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import agentrl
from agentrl.report.metrics import read
from agentrl.run_folder import RunFolder
from agentrl.supervision.child import module_command
from trainer.gpu_report import workload
from trainer.gpu_report.cells import Claims, Measured, NotHere, Setup
from trainer.gpu_report.engine_cells import engine_config

TAIL_CHARACTERS = 3000
TESTS_TIMEOUT_S = 570.0
OWN_TESTS = "tests/trainer/gpu_report"
"""They measure what the other cells measure."""


def async_pair(setup: Setup, claims: Claims) -> Measured:
    """Two short runs that differ in `rollout.max_lag` alone: seconds of the steps after the first one."""
    _save_model(setup)
    pair = {name: _trained(setup, claims, max_lag=lag) for name, lag in (("synchronous", 0), ("asynchronous", 2))}
    summary = ", ".join(f"{name} {found.get('seconds_a_step', math.nan):.3g} s a step" for name, found in pair.items())
    return {"summary": summary, **pair}


def shared_run(setup: Setup, claims: Claims) -> Measured:
    """A short run in which engine and learner have one GPU in turn, and weights travel by ipc."""
    _save_model(setup)
    found = _trained(setup, claims, max_lag=0, sleep_while_training=not setup.is_tiny)
    return {"summary": f"{found.get('seconds_a_step', math.nan):.3g} s a step", **found}


def _save_model(setup: Setup) -> None:
    """With a chat template."""
    from trainer.warmstart import tiny_model

    size = setup.of_size("0.5B", "tiny")
    model = workload.make_model(size).to(workload.dtype_of(torch.device(setup.device)))
    texts = ["Count from 1 to 4.", "1, 2, 3, 4"] * 4
    tiny_model.save(setup.folder / workload.MODEL, model, tiny_model.make_tokenizer(texts, 300))


def _trained(setup: Setup, claims: Claims, *, max_lag: int, **engine: Any) -> Measured:
    config = engine_config(setup, max_context=setup.of_size(4096, 256), max_num_seqs=setup.of_size(64, 8), **engine)
    name, num_steps = f"lag-{max_lag}", setup.of_size(6, 2)
    turn_tokens, groups = setup.of_size(1024, 16), setup.of_size(8, 2)
    tree = config.model_dump(mode="json", exclude_unset=True) | {
        "name": name,
        "out_dir": str(setup.folder / "runs"),
        "train": {"steps": num_steps},
        "rollout": {
            "max_lag": max_lag,
            "max_context": config.rollout.max_context,
            "max_turn_tokens": turn_tokens,
            "groups_per_step": groups,
            "group_size": setup.of_size(8, 4),
            "canary_every": 0,
        },
        "eval": {"num_tasks": 1, "samples_per_task": 1, "every": 0},
    }
    path = setup.folder / f"{name}.json"
    path.write_text(json.dumps(tree))
    done = subprocess.run([*module_command("agentrl"), "train", str(path)], capture_output=True, text=True)
    run = RunFolder(path=setup.folder / "runs" / name)
    lines = [line for line in read(run.metrics) if line.kind == "step"]
    said = (done.stdout + done.stderr)[-TAIL_CHARACTERS:]
    claims.hold(done.returncode == 0 and len(lines) == num_steps, f"the run with max_lag {max_lag} failed: {said}")
    if len(lines) < 2:
        return {"exit_code": done.returncode}
    seconds = lines[-1].time_s - lines[0].time_s
    return {
        "max_lag": max_lag,
        "steps": len(lines) - 1,
        "seconds_a_step": seconds / (len(lines) - 1),
        "last_metrics": lines[-1].values,
    }


def gpu_tests(setup: Setup, claims: Claims) -> Measured:
    """`pytest -m gpu` of the checkout, without the tests of these cells."""
    root = Path(agentrl.__file__).parents[1]
    if not (root / "tests" / "device.py").is_file():
        raise NotHere("the tests are in the checkout only: call this where agentrl was installed from one")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu", "-rfEs", "tests"]
    command += [f"--ignore={OWN_TESTS}"]
    if setup.is_tiny:
        command.append("--collect-only")
    done = subprocess.run(command, cwd=root, env=os.environ, capture_output=True, text=True, timeout=TESTS_TIMEOUT_S)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-TAIL_CHARACTERS:]
    claims.hold(done.returncode == 0, last)
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", last)}
    return {"summary": last, "counts": counts, "output_end": done.stdout[-TAIL_CHARACTERS:]}
