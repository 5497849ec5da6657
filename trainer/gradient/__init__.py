"""How the gradient is made: log-probabilities, passes, per-trajectory norms, the hand-off to DeepSpeed.

May import: `trainer.objective`, `trainer.packing`. Start reading in `step_gradient.py`.
"""
