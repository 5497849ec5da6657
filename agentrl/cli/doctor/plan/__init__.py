"""`agentrl doctor CONFIG --plan`: what a run needs of each GPU and of its machine, before anything is started.

May import: everything before `agentrl.cli` in the order of imports. Start reading in `planning.py`, which makes a plan;
`records.py` has what the learner's half (`python -m trainer.plan`) answers.
"""
