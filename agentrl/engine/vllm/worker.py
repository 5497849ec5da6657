"""Mixed into vLLM's worker by `--worker-extension-cls`: what POST /collective_rpc may call, beside vLLM's own methods.

Knows the worker's weight-transfer engine, which must be one of ours.
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Each call answers once a worker."""

    weight_transfer_engine: Any
    vllm_config: Any
    model_runner: Any

    def weights_checksum(self) -> str:
        """`agentrl.engine.checksum` of everything the last finished update brought; empty before any."""
        return str(self.weight_transfer_engine.checksum)

    def takes_seeds(self) -> str:
        """Whether a request may carry a seed: on the CPU a generator cannot be set back after a part of a prompt."""
        on_cpu = self.vllm_config.device_config.device_type == "cpu"
        return "no" if on_cpu and self.vllm_config.scheduler_config.enable_chunked_prefill else "yes"

    def renew_tied_layers(self) -> None:
        """To be called after vLLM's `reload_weights`, which leaves a tied output head's packed copy as it was."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.expected.renew_tied_layers(self.model_runner.get_model())
