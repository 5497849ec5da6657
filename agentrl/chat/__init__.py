"""HTTP endpoints for agents that bring their own loop, and for models behind an OpenAI-compatible endpoint.

May import: everything up to `agentrl.rollout`. Start reading in `session.py`.
"""
