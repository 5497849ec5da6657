"""Child processes with an owner, and what watches over a run: restarts, status, watchdog, HTTP serving, secrets.

May import: `agentrl.config`, `agentrl.run_folder`. Start reading in `child.py` (processes) or `wait_graph.py` (who
waits for whom).
"""
