"""vLLM's own NCCL and CUDA IPC backends, which here also refuse other models, compute a checksum and renew tied layers.

vLLM's transport is unchanged. Unlike our own backends these load while they receive: an update that fails in the middle
leaves a mix of weights, and the engine must not serve before a complete one.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from agentrl.engine.vllm import loading as vllm_loading


class _Proven:
    """Mixin that comes before vLLM's engine class."""

    supports_draft_weight_update = False
    model: Any
    model_config: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.expected = vllm_loading.Expected(self.model, self.model_config)
        self.checksum = ""
        self._arriving = ""

    def receive_weights(self, update_info: Any) -> None:
        """vLLM's own, with a checksum. Raises ValueError for another model's names or shapes."""
        offered = {name: tuple(shape) for name, shape in zip(update_info.names, update_info.shapes, strict=True)}
        self.expected.check(offered, "the learner's update")
        model, loading = self.model, vllm_loading.LoadingModel(self.model)
        self.model = loading
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self.model = model
        self._arriving = loading.checksum.hexdigest()

    def finish_weight_update(self) -> None:
        """vLLM's own; then tied layers are renewed."""
        super().finish_weight_update()  # type: ignore[misc]
        self.expected.renew_tied_layers(self.model)
        self.checksum = self._arriving


class NCCLEngine(_Proven, NCCLWeightTransferEngine):  # type: ignore[misc]
    """Backend `agentrl_nccl`.

    Example: `vllm serve MODEL --weight-transfer-config '{"backend": "agentrl_nccl"}'`.
    """


class IPCEngine(_Proven, IPCWeightTransferEngine):  # type: ignore[misc]
    """Backend `agentrl_ipc`.

    Example: `vllm serve MODEL --weight-transfer-config '{"backend": "agentrl_ipc"}'`.
    """
