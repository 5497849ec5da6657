"""Ways to isolate a session.

May import: `sandbox.protocol`, `sandbox.supervisor`, `sandbox.worker`. Start reading in `base.py` (the interface), then
`isolate.py` (namespaces and mounts), `seccomp.py` (system calls) and `probe.py`, which picks a backend. Importing this
package loads no backend.
"""
