"""Runs untrusted Python in isolated sessions, over HTTP.

May import: no other package of the project. Others import `client.py`, `protocol.py` and the command line.
Start reading in `protocol.py` (the records), then `pool.py` (sessions and slots), `supervisor.py` (one interpreter) and
`backends/isolate.py` (what isolates it).
"""
