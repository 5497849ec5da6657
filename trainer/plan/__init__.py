"""The memory that a learner would take, from the model's config.json and without a GPU: `python -m trainer.plan`.

May import: `agentrl`, `trainer.gradient`, `trainer.lora`, `trainer.model`, `trainer.objective`, `trainer.packing`,
`trainer.reference`, `trainer.startup_proof`, `trainer.warmstart`, `trainer.weights.source`. Start reading in
`memory.py`, which has the formulas; `dry_pass.py` counts what a pass allocates, `choice.py` is what a run asks.
"""
