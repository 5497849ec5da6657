"""Checks an environment before anyone trains on it.

May import: everything before it in the order of imports. Start reading in `check_env.py`.
"""

from agentrl.check.check_env import Check, CheckReport, check_env, wrong_answer

__all__ = ["Check", "CheckReport", "check_env", "wrong_answer"]
