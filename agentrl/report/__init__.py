"""Reports of a run: statistics, metrics, evaluation, charts, findings, the console.

May import: `agentrl.types`, `agentrl.errors`, `agentrl.run_folder`, `agentrl.supervision`, `agentrl.engine.base`,
`agentrl.rollouts.group`. Start reading in `metrics.py`.
"""
