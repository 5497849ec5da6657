"""One training run, wired: orchestrator, training loop, the learner's API, launch, resume.

May import: everything below. Start reading in `training.py` (processes) or `orchestrator.py` (the run).
"""
