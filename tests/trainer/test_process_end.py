"""The end of a rank: what it printed is whole, and nothing of the interpreter's own end runs."""

from __future__ import annotations

import os
import subprocess
import sys

from agentrl.supervision.serving import free_port

PROGRAM = """
import atexit, sys
from trainer.process_end import end_process
atexit.register(sys.exit, "the interpreter's own end ran")
sys.stdout.write("written")
end_process(3)
"""
COLLECTIVE = """
import torch
from torch import distributed
from trainer.process_end import end_process
distributed.init_process_group("gloo")
group = distributed.group.WORLD  # as DeepSpeed does: gloo's threads then go on
sums = [torch.empty(1_000_000) for _ in range(2)]
distributed.barrier()
group.allgather(sums, torch.ones(1_000_000))
distributed.destroy_process_group()
del sums
end_process()
"""


def test_what_was_printed_is_written_and_nothing_else_runs() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "written", "")


def test_a_rank_ends_while_a_thread_of_gloo_holds_tensors() -> None:
    """With the interpreter's own end, about every second such pair aborts."""
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [subprocess.Popen([sys.executable, "-c", COLLECTIVE], env=env | {"RANK": rank}) for rank in "01"]
    try:
        assert [process.wait(timeout=100) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
