"""Code that runs inside vLLM's own processes. In it `import vllm` imports vLLM itself, not this package.

May import: `agentrl.engine.checksum`, `agentrl.supervision.secrets`, `agentrl.supervision.parent`.
Start reading in `plugin.py`.
"""
