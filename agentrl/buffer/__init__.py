"""The bounded store between rollout and learner: slots, the staleness rule, the journal, the ESS guard.

May import: `agentrl.types`, `agentrl.errors`, `agentrl.config`, `agentrl.run_folder`, `agentrl.report.statistics`,
`agentrl.report.learning_signal`. Start reading in `staleness.py` (the rule), then `trajectory_buffer.py` (the store).
"""
