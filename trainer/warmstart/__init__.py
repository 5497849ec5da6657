"""A small model made from scratch out of an environment's scripted demonstrations.

May import: `agentrl`, `sandbox.client`. Start reading in `train.py`.
"""
