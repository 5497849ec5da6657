"""Warm start: makes a small model from an environment's scripted demonstrations, before a run.

May import: `agentrl`, `sandbox.client`, `trainer.whole_folder`. Start reading in `train.py`; `__main__.py` is the
command.
"""
