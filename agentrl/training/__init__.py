"""One training run: its processes, the orchestrator, the rollout and training loops, the learner API, resume.

May import: everything before it in the order of imports; never `trainer`, which runs as a process of its own. Start
reading in `run.py` (which processes a run has) or `orchestrator.py` (the run itself).
"""
