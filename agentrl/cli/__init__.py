"""The `agentrl` command: one module for each subcommand.

May import: everything before it in the order of imports. Start reading in `main.py`.
"""
