"""What runs inside vLLM's own processes. `import vllm` means the engine's package, not this one.

May import: `agentrl.engine.checksum`, `agentrl.supervision.secrets`. Start reading in `plugin.py`.
"""
