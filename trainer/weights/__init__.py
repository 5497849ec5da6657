"""The weight update: how weights leave the learner, into folders or directly to engines.

May import: `trainer.lora`, `trainer.ranks`, `trainer.whole_folder`, `agentrl.engine`. Start reading in `transfer.py`.
"""
