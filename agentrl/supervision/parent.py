"""Ends a process whose parent has ended, for processes that load code of ours inside a part: vLLM's, a learner's ranks.

The last line of defence: a part's guard and its supervisor end the part's processes (orphan_guard.py, process_tree.py),
and this holds where both were killed at the same moment, e.g. by `pkill -9 -f agentrl`.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from agentrl.supervision.orphan_guard import MARK_VARIABLE

LOOK_S = 1.0
THREAD_NAME = "end with parent"


def end_with_parent() -> None:
    """From now on, kill this process at the latest LOOK_S after its parent has ended. May be called again.

    Does so in processes below a guard alone: one that a user started may outlive the shell. The kernel's own signal
    for this (PR_SET_PDEATHSIG) would come already when the thread of the parent that started this process ends.
    """
    is_watched = any(thread.name == THREAD_NAME for thread in threading.enumerate())
    if MARK_VARIABLE in os.environ and not is_watched:
        threading.Thread(target=_watch, args=(os.getppid(),), name=THREAD_NAME, daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)
