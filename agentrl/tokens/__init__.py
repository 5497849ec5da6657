"""Messages to token ids and back: what the model reads and what it wrote, append-only.

May import: `agentrl.config`, `agentrl.types`. Start reading in `tokenizer.py`.
"""
