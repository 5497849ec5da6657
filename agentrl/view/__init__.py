"""See a run: reads run folders into rows, and serves them as JSON and as a page, or exports them.

It only reads, so it opens a run that is being written, was killed, or is damaged, and cannot disturb training.

May import: `agentrl.types`, `agentrl.errors`, `agentrl.run_folder`, `agentrl.supervision`,
`agentrl.report`, `agentrl.buffer`. Start reading in `rows.py` (what there is to see), then `run_reader.py`.
"""
