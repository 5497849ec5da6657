"""How weights leave the learner: their source, folders, and transfer to engines.

May import: `agentrl`, `trainer.lora`. Start reading in `transfer.py`.
"""
