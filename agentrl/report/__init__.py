"""Reports of a run: statistics, metrics, evaluation, figures, the report page, the console.

May import: `agentrl.types`, `agentrl.errors`, `agentrl.config`, `agentrl.run_folder`, `agentrl.supervision`,
`agentrl.tokens`, `agentrl.engine.base`, `agentrl.rollouts.group`. Start reading in `metrics.py`.
"""
