"""What generates tokens: the Engine protocol, the vLLM client, the pool, weight updates and their proof, launch.

May import: `agentrl.config`, `agentrl.supervision`. Start reading in `vllm_engine.py`.
`vllm/` runs inside the vLLM server.
"""
