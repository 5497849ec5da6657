"""Sequence parallelism on two ranks, for every architecture whose packs it divides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import without_gpus
from tests.trainer.test_architectures import PACKED

ROOT = Path(__file__).parents[2]
REFUSED = {"DeepseekV3": "heads of one size"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_divided_packs_have_the_logprobs_and_gradients_of_whole_ones(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "--module", "tests.trainer.divided_packs", str(tmp_path / "out.json")]
    subprocess.run(command, cwd=ROOT, env=os.environ | without_gpus(), check=True, timeout=280)
    found = json.loads((tmp_path / "out.json").read_text())
    assert list(found) == list(PACKED)
    refused = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    assert refused.keys() == REFUSED.keys() and all(REFUSED[name] in reason for name, reason in refused.items())
    for name, (logprob, gradient) in ((name, one) for name, one in found.items() if name not in refused):
        assert logprob < 1e-5 and gradient < 1e-5, (name, logprob, gradient)
