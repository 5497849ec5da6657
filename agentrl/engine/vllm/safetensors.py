"""A weight-transfer backend inside vLLM that reads a safetensors folder in shared memory or on a shared disk.

Works on CPU and GPU; each tensor-parallel rank reads the folder by itself. Independent of versions, HTTP and training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from agentrl.engine.vllm import loading


@dataclass
class SafetensorsInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: each update names its folder.

    Example: `SafetensorsInitInfo()`.
    """


@dataclass
class SafetensorsUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The folder with all weights, in Hugging Face names and layout.

    Example: `SafetensorsUpdateInfo(path="/dev/shm/run/v5")`.
    """

    path: str


class SafetensorsEngine(WeightTransferEngine[SafetensorsInitInfo, SafetensorsUpdateInfo]):  # type: ignore[misc]
    """Loads `<path>/model*.safetensors` through vLLM's layerwise reload; every failure raises.

    The update reads only the headers of the files, and the finish loads them: a refused folder leaves the old weights.

    Example: `vllm serve MODEL --weight-transfer-config '{"backend": "safetensors"}'`.
    """

    init_info_cls = SafetensorsInitInfo
    update_info_cls = SafetensorsUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.expected = loading.Expected(self.model, self.model_config)
        self.checksum = ""
        self._folder: Path | None = None

    def init_transfer_engine(self, init_info: SafetensorsInitInfo) -> None:
        """No connection to make."""

    def start_weight_update(self) -> None:
        """Drop the folder of an interrupted update."""
        self._folder = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See `receive_weights`. The base class synchronises an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SafetensorsUpdateInfo) -> None:
        """Check the folder. Raises FileNotFoundError without files, ValueError for those of another model."""
        folder = Path(update_info.path)
        self.expected.check(loading.shapes_of(folder), str(folder))
        self._folder = folder

    def finish_weight_update(self) -> None:
        """Load the folder. Raises ValueError when none was named since the start."""
        if self._folder is None:
            raise ValueError("no folder was named between start_weight_update and finish_weight_update")
        loading.load(self, self.expected, loading.tensors_of(self._folder))
        self._folder = None

    def shutdown(self) -> None:
        """Nothing is held between updates."""
