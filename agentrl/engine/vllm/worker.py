"""Methods added to vLLM's worker by `--worker-extension-cls`, which POST /collective_rpc may call beside vLLM's own.

The worker's weight-transfer engine must be one of ours.
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Each method returns one result per worker.

    Example: POST /collective_rpc `{"method": "weights_checksum"}` calls one of them.
    """

    weight_transfer_engine: Any
    vllm_config: Any
    model_runner: Any

    def weights_checksum(self) -> str:
        """`agentrl.engine.checksum` of all tensors of the last finished update; empty before the first."""
        return str(self.weight_transfer_engine.checksum)

    def takes_seeds(self) -> str:
        """Whether a request may carry a seed: on the CPU, a random generator cannot be reset after part of a prompt."""
        on_cpu = self.vllm_config.device_config.device_type == "cpu"
        return "no" if on_cpu and self.vllm_config.scheduler_config.enable_chunked_prefill else "yes"

    def can_sleep(self) -> str:
        """Whether vLLM's `sleep` releases memory: it needs a GPU and `--enable-sleep-mode`, and is ignored without."""
        return "yes" if self.vllm_config.model_config.enable_sleep_mode else "no"

    def renew_tied_layers(self) -> None:
        """Call after vLLM's `reload_weights`, which does not renew the packed copy of a tied output head."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.expected.renew_tied_layers(self.model_runner.get_model())
