"""Where the metrics of a run go beside metrics.jsonl: TensorBoard, Weights & Biases, trackio, MLflow.

May import: `agentrl.errors`, `agentrl.run_folder`, `agentrl.supervision`.
Start reading in `base.py` (the protocol and the registry), then `isolated.py`. Nothing here imports a library of a sink
before a run names that sink.
"""
