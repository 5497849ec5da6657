"""Rows of data sets as tasks: files and the hub, near-duplicates, and the endless task source with its curriculum.

May import: `agentrl.types`, `agentrl.errors`, `agentrl.config`, `agentrl.env`. Start reading in `source.py`.
"""
