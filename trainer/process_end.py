"""The end of a learner process: at once, without the interpreter's own end.

gloo's threads may still hold a collective's tensors when the rank has all its results, and DeepSpeed keeps its process
groups until the interpreter ends. A thread that frees a tensor while the interpreter ends aborts the process
("terminate called without an active exception", pytorch/pytorch issue 190489): a finished run would count as failed.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def end_process(code: int = 0) -> NoReturn:
    """End this process with `code`. What was printed and logged is written; `atexit` functions are not called."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
