"""`agentrl doctor`: reports what would prevent a run on this machine, and how to fix it.

May import: everything before `agentrl.cli` in the order of imports. Start reading in `checks.py`, which
lists the checks; `plan/` is `agentrl doctor CONFIG --plan`.
"""
