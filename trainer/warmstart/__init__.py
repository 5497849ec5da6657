"""A small model made from scratch out of an environment's scripted demonstrations.

Start reading in `train.py`.
"""
