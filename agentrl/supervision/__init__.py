"""Supervises a run: child processes and their restarts, status file, watchdog, HTTP serving, secrets.

May import: `agentrl.errors`, `agentrl.config`, `agentrl.run_folder`. Start reading in `child.py` (processes) or
`wait_graph.py` (which part of a run waits for which).
"""
