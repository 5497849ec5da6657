"""The gradient of a step: log-probabilities, passes over packs, per-trajectory norms, the hand-off to DeepSpeed.

May import: `agentrl.types`, `agentrl.errors`, `agentrl.config`, `agentrl.report`,
`trainer.objective`, `trainer.packing`, `trainer.ranks`, `trainer.step_stats`. Start reading in `step_gradient.py`.
"""
