"""The example to read first runs unchanged, and its policy learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"step (\d+): reward ([\d.]+), version (\d+), ESS ([\d.]+)")


def test_the_loop_trains_on_the_weights_that_it_made() -> None:
    # A process of its own: DeepSpeed keeps global state.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/minimal_loop.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [tuple(map(float, found)) for found in LINE.findall(done.stdout)]
    rewards = [reward for _, reward, _, _ in steps]
    assert [version for _, _, version, _ in steps] == list(range(1, 13))
    assert all(ess == 1.0 for *_, ess in steps)  # every batch was sampled by the weights that it trains
    assert mean(rewards[-3:]) > 3 * mean(rewards[:3])
