"""What is optimised, as pure functions: importance ratios, baselines, VCPO, the policy gradient's weights.

May import: `agentrl.config`, `agentrl.types`. Start reading in `policy_gradient.py`.
"""
