"""The learner process: optimizer steps on batches from the orchestrator, with DeepSpeed and VCPO, and their weights.

May import: `agentrl`, and `sandbox.client` for the warm start. Within the package each module imports earlier ones
only: process_end, ranks, whole_folder, gpu_memory -> objective -> packing, step_stats -> gradient -> split_variance,
diagnostics -> lora, model -> startup_proof -> reference -> weights -> warmstart -> plan -> deepspeed_settings,
schedules, learner -> checkpoint, orchestrator_client -> loop -> __main__.
One stands apart: gpu_report/ measures what plan/ computes, and no run imports it. warmstart/ makes a small model before
a run; its command shows errors as those of `agentrl` do (`agentrl.cli.options`).
Start reading in `learner.py`; the loss is `objective/interface.py`, the norms `gradient/norms.py`, the weight
update `weights/transfer.py`.
"""
