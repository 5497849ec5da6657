"""The learner: DeepSpeed, exact gradients of each trajectory, VCPO.

May import: `agentrl`, `sandbox.client`. Start reading in `learner.py` (one step), then `objective/` (what
is optimised).
"""
