"""`agentrl doctor`: what would keep a run from working on this machine.

Start reading in `plan.py`.
"""
