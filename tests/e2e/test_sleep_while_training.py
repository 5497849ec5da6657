"""A whole run with the real vLLM and the real learner, which take turns: the engine sleeps while the learner steps.

vLLM's CPU build releases no memory. Everything else is as on a GPU: its scheduler, its routes, and the order of calls.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.report.metrics import read
from agentrl.run_folder import RunFolder
from tests.conftest import VLLMServer
from tests.device import parity_bound
from tests.e2e.test_black_box import shared, write_config

__all__ = ["shared"]
pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

TRAIN = """
import sys
from agentrl.cli.main import main
from agentrl.engine.vllm_control import VLLMControl

async def can_sleep(self):
    return True

VLLMControl.can_sleep = can_sleep
sys.exit(main())
"""
"""`agentrl`, to which a server on a CPU may be put to sleep."""


def test_every_step_is_made_while_the_engine_sleeps(tmp_path: Path, tiny_model_dir: Path, shared: VLLMServer) -> None:
    rollout = {"groups_per_step": 2, "group_size": 4, "max_context": 384, "max_turn_tokens": 32, "max_lag": 0}
    engine = {"url": shared.url, "sleep_while_training": True}
    config = write_config(tmp_path, "Even", tiny_model_dir, rollout=rollout, engine=engine)
    before = len(shared.log_path.read_text())
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, "train", str(config)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line for line in read(RunFolder.open(tmp_path / "runs" / "black-box").metrics) if line.kind == "step"]
    assert [line.step for line in steps] == [1, 2]
    assert all(line.values["engine/parity_max_abs"] < parity_bound() for line in steps)
    assert all(line.values["learner/parity_max_abs"] < parity_bound() for line in steps)
    log = shared.log_path.read_text()[before:]
    assert log.count("seconds to fall asleep") == 2
    assert log.count("seconds to wake up tags ['weights']") == log.count("seconds to wake up tags ['kv_cache']") == 2
