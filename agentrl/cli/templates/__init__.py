"""The environments that `agentrl env new` copies: complete examples of the environment API, tested as they are.

May import: what an environment imports (`agentrl.env`, `agentrl.tools`, `agentrl.types`). Start reading in
`tool_environment.py`.
"""
