"""Runs untrusted Python in isolated sessions, over HTTP.

May import: no other package of the project. Other packages import only `client.py` and `protocol.py`. Start reading in
`protocol.py` (the records), then `pool.py` (sessions and slots), `supervisor.py` (one interpreter) and
`backends/isolate.py` (what isolates it).
"""
