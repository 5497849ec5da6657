"""Generates tokens: the Engine protocol, the vLLM client, the engine pool, weight updates and their proof, launch.

May import: `agentrl.types`, `agentrl.errors`, `agentrl.config`, `agentrl.supervision`. Start reading in `base.py` (what
an engine is), then `vllm_engine.py`. `vllm/` runs inside the vLLM server.
"""
