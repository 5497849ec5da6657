"""One episode, one group of episodes, and what they count for in the loss. Knows no learner and no HTTP.

May import: everything up to `agentrl.engine`. Start reading in `episode.py`.
"""
