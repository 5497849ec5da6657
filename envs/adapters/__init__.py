"""Environments of other libraries as agentrl's, and agentrl's as Gymnasium's.

May import: `agentrl`, `sandbox.client`, and the library that a module adapts, when it is used. Start reading in
`from_gymnasium.py`. The schemes of targets (`gymnasium:FrozenLake-v1`) are entry points in pyproject.toml.
"""
