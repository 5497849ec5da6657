"""The `agentrl` command: what its subcommands do and print.

May import: everything. Start reading in `main.py`.
"""
