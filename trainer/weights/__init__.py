"""How weights leave the learner: their source, folders, and transfer to engines.

Start reading in `transfer.py`.
"""
