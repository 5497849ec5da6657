"""Asynchronous against synchronous training at equal reward, on a task whose tool makes the episodes wait.

    python -m benchmarks.asynchrony --help

arms.py says what is compared, waits.py how long a tool call waits and how a run's seconds are counted. run.py makes one
run, sweep.py those that are missing, scores.py measures their weights. predict.py says beforehand what should come out,
report.py what did.
"""
