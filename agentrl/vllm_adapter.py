"""A weight-transfer backend inside vLLM that replaces a LoRA adapter, and leaves the weights beside it as they are.

The server serves one adapter, which is the policy; at its start that is `neutral_adapter`, which adds nothing. An
update names a folder in PEFT's layout. vLLM's own route (/v1/load_lora_adapter in place) is not used: a running request
carries the folder it began with, and loads that one again after the update. Knows no versions, HTTP or training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from agentrl import vllm_loading
from agentrl.checksum import Checksum
from agentrl.vllm_safetensors import SafetensorsEngine, SafetensorsUpdateInfo

FILES = "adapter_model*.safetensors"
ADAPTER_ID = 1  # vLLM counts from 1, and ours is the first and only one
PREFIX = "base_model.model."


class AdapterEngine(SafetensorsEngine):
    """Loads `<path>/adapter_model*.safetensors` as the served adapter; every failure raises.

    The update looks at the files' headers only, the finish loads: a refused folder leaves the old adapter whole.
    Needs `--enable-lora` and `--lora-modules` with one adapter. Raises ValueError without.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not hasattr(self.model, "lora_manager"):
            raise ValueError("the adapter backend needs a server that was started with --enable-lora")
        self._manager = self.model.lora_manager

    def receive_weights(self, update_info: SafetensorsUpdateInfo) -> None:
        """Check the folder. Raises FileNotFoundError without files, ValueError for an adapter of another model."""
        folder = Path(update_info.path)
        self._check(vllm_loading.shapes_of(folder, FILES), folder)
        self._folder = folder

    def finish_weight_update(self) -> None:
        """Load the folder. Raises ValueError when none was named since the start, or when vLLM cannot serve it."""
        if self._folder is None:
            raise ValueError("no folder was named between start_weight_update and finish_weight_update")
        checksum = Checksum()
        # Summed as it is read: vLLM scales and joins the very tensors in place.
        tensors = dict(checksum.through(vllm_loading.tensors_of(self._folder, FILES)))
        self._replace(self._made(tensors, self._folder))
        self.checksum, self._folder = checksum.hexdigest(), None

    def _made(self, tensors: dict[str, Tensor], folder: Path) -> LoRAModel:
        manager = self._manager
        helper = PEFTHelper.from_local_dir(str(folder), None)
        helper.validate_legal(manager.lora_config)
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        return LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            tensors,
            helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )

    def _replace(self, adapter: LoRAModel) -> None:
        self._manager.remove_adapter(ADAPTER_ID)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(ADAPTER_ID)

    def _check(self, shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
        """Raises ValueError for layers that the model does not have, that vLLM would leave out, or that do not fit."""
        supported = set(_parts(self._manager))
        layers: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            layer, _, part = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
            layers.setdefault(layer, {})[part] = shape
        for layer, parts in layers.items():
            if (weight := self.expected.shapes.get(f"{layer}.weight")) is None:
                raise ValueError(f"{folder} has an adapter for {layer}, which the served model does not have")
            if layer.rpartition(".")[2] not in supported:
                raise ValueError(f"{folder} has an adapter for {layer}, where this vLLM serves none")
            down, up = parts.get("lora_A"), parts.get("lora_B")
            if down is None or up is None or (up[0], down[1]) != weight or down[0] != up[1]:
                raise ValueError(f"{folder}: {parts} do not fit {layer}, whose weight is {weight}")


def _parts(manager: Any) -> Iterator[str]:
    """Names of layers as checkpoints have them: vLLM joins q, k and v into one."""
    for module in manager.supported_lora_modules:
        yield from manager.packed_modules_mapping.get(module, [module])
