"""`python -m trainer.plan`: the memory that a learner would take, from the model's config.json and without a GPU.

May import: `agentrl`, `trainer.gradient`, `trainer.lora`, `trainer.model`, `trainer.objective`, `trainer.packing`,
`trainer.warmstart`. Start reading in `memory.py`, which has the formulas; `dry_pass.py` counts what a training pass
allocates.
"""
