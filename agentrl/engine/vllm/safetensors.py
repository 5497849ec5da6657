"""A weight-transfer backend inside vLLM that reads a safetensors folder in shared memory or on a shared disk.

Works on CPU and GPU; each tensor-parallel rank reads the folder by itself. Independent of versions, HTTP and training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from agentrl.engine.vllm import changes, loading


@dataclass
class SafetensorsInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: each update names its folder.

    Example: `SafetensorsInitInfo()`.
    """


@dataclass
class SafetensorsUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The folder with all weights, in Hugging Face names and layout, and those with what changed since, in order.

    Example: `SafetensorsUpdateInfo(path="/dev/shm/run/v5", deltas=["/dev/shm/run/v6"])` is version 6.
    """

    path: str
    deltas: list[str] = field(default_factory=list)


class SafetensorsEngine(WeightTransferEngine[SafetensorsInitInfo, SafetensorsUpdateInfo]):  # type: ignore[misc]
    """Loads `<path>/model*.safetensors`, and what changed since, through vLLM's layerwise reload; every failure raises.

    The update reads only the headers of the files, and the finish loads them: a refused folder leaves the old weights.
    Nothing is kept between updates, so that every update can be taken from every state. vLLM's own loader of patches
    (`checkpoint_weight_patch`) writes into the loaded weights instead, which a CPU has packed: see docs/decisions.md.

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
        self._deltas: list[Path] = []

    def init_transfer_engine(self, init_info: SafetensorsInitInfo) -> None:
        """No connection to make."""

    def start_weight_update(self) -> None:
        """Drop the folder of an interrupted update."""
        self._folder = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See `receive_weights`. The base class synchronises an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SafetensorsUpdateInfo) -> None:
        """Check the folders. Raises FileNotFoundError without files, ValueError for those of another model."""
        folder, deltas = Path(update_info.path), [Path(delta) for delta in update_info.deltas]
        shapes = loading.shapes_of(folder)
        self.expected.check(shapes, str(folder))
        changes.check(deltas, shapes)
        self._folder, self._deltas = folder, deltas

    def finish_weight_update(self) -> None:
        """Load the folders. Raises ValueError when none was named since the start."""
        if self._folder is None:
            raise ValueError("no folder was named between start_weight_update and finish_weight_update")
        tensors = changes.changed_tensors(loading.tensors_of(self._folder), self._deltas, self.device)
        loading.load(self, self.expected, tensors)
        self._folder = None

    def shutdown(self) -> None:
        """Nothing is held between updates."""
