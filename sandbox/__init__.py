"""Runs untrusted Python in isolated sessions, over HTTP.

May import: nothing of `agentrl`, `envs` or `trainer`. Start reading in `client.py` to use it, in `server.py` and
`pool.py` for the service, in `backends/` for the isolation.
"""
