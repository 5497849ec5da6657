"""The `agentrl` command: one module for each subcommand.

May import: everything. Start reading in `main.py`.
"""
