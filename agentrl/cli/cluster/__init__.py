"""`agentrl cluster render`: writes the file that starts a run under Slurm or on Kubernetes, by Ray.

May import: everything before `agentrl.cli` in the order of imports. Start reading in `resources.py`, which
computes the nodes; `slurm.py` and `kuberay.py` each write one kind of file.
"""
