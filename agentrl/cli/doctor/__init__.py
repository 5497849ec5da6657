"""`agentrl doctor`: reports what would prevent a run on this machine, and how to fix it.

May import: everything up to `agentrl.train`. Start reading in `plan.py`, which lists the checks.
"""
