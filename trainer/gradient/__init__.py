"""The gradient of a step: log-probabilities, passes over packs, per-trajectory norms, the hand-off to DeepSpeed.

May import: `trainer.objective`, `trainer.packing`, `trainer.ranks`, `trainer.step_stats`. Start reading in
`step_gradient.py`.
"""
