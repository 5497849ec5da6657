"""The loss, as pure functions: importance ratios, baselines, VCPO, the weight of every score in the policy gradient.

May import: `agentrl.config`, `agentrl.report.statistics`. Start reading in `policy_gradient.py`.
"""
