"""The weight update: how weights leave the learner, into folders or directly to engines.

May import: `agentrl.types`, `agentrl.errors`, `agentrl.config`, `agentrl.supervision`, `agentrl.engine`,
`agentrl.training.model_folder`, `trainer.lora`, `trainer.ranks`, `trainer.whole_folder`. Start
reading in `transfer.py`.
"""
