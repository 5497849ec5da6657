"""The measurements of `agentrl doctor --gpu-report`, each a cell that runs in a process of its own, on random weights.

May import: `agentrl`, `trainer`. Start reading in `cells.py`, which lists the cells; `learner_cells.py` needs no vLLM,
`engine_cells.py` does. benchmarks/ measures with the same code.
"""
