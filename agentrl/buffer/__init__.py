"""The bounded store between rollout and learner: slots, the staleness rule, the journal, the ESS guard.

May import: `agentrl.types`, `agentrl.errors`, `agentrl.config`, `agentrl.run_folder`, `agentrl.report.statistics`.
Start reading in `trajectory_buffer.py`.
"""
