"""The ways to isolate a session, one backend per file; `probe.py` picks one. Importing the package loads none of them.

May import: `sandbox.protocol`, `sandbox.supervisor`, `sandbox.worker`. Start reading in `base.py`, then
`namespaces.py`.
"""
