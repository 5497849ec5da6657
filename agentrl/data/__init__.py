"""Rows of data sets as tasks: files and the hub, near-duplicates, the endless task source, the curriculum.

May import: `agentrl.env`. Start reading in `source.py`.
"""
