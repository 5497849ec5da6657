"""Checks an environment before anyone trains on it.

    check_env.py   all checks, in this process; answers.py, cancellation.py, token_record.py are some of them
    check_target.py  the same in a process that can be ended, which worker.py is
    rehearsal.py   one scripted episode before a run

May import: everything before it in the order of imports. Start reading in `check_env.py`.
"""

from agentrl.check.answers import wrong_answer
from agentrl.check.check_env import check_env
from agentrl.check.check_target import check_target
from agentrl.check.rehearsal import rehearse
from agentrl.check.report import TIMEOUT_S, Check, CheckReport

__all__ = ["TIMEOUT_S", "Check", "CheckReport", "check_env", "check_target", "rehearse", "wrong_answer"]
