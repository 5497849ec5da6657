"""Loaded inside vLLM by its own plugin entry point: a weight-transfer backend that reads a safetensors folder.

The calls are those of vLLM's NCCL backend (init, start, update, finish, shutdown), so the client is the same; only the
bytes travel another way: through shared memory or a disk that learner and engine both see. Works on CPU and GPU, and
each tensor-parallel rank reads the folder by itself. Knows nothing of versions, HTTP or training. This is the one file
of the package that imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "safetensors"
SHARDS = "model*.safetensors"


def register() -> None:
    """Make the backend known. Harmless where it is not used: vLLM builds an engine only for the configured backend."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SafetensorsEngine)


@dataclass
class SafetensorsInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand: the folder is named by each update."""


@dataclass
class SafetensorsUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The folder that holds all weights, in Hugging Face names and layout."""

    path: str


class SafetensorsEngine(WeightTransferEngine[SafetensorsInitInfo, SafetensorsUpdateInfo]):  # type: ignore[misc]
    """Loads `<path>/model*.safetensors` through vLLM's layerwise reload; every failure raises."""

    init_info_cls = SafetensorsInitInfo
    update_info_cls = SafetensorsUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tied = _tied_names(self.model)  # now: a reload gives each name a parameter of its own
        self._shapes = _shapes(_checkpoint(self.model_config))

    def init_transfer_engine(self, init_info: SafetensorsInitInfo) -> None:
        """No connection to make."""

    def start_weight_update(self) -> None:
        """Put the layers into the state in which they accept checkpoint tensors."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """Read the folder. The base class synchronises an accelerator unconditionally, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SafetensorsUpdateInfo) -> None:
        """Load every tensor of the folder.

        Raises FileNotFoundError without files, ValueError when names and shapes are not those of the checkpoint that
        the engine started from: vLLM would keep the old values of what is missing with no more than a log line.
        """
        folder = Path(update_info.path)
        self._refuse_other_model(folder)
        self.model.load_weights(_tensors(folder))

    def _refuse_other_model(self, folder: Path) -> None:
        offered = _shapes(folder)
        optional = {name for names in self._tied.values() if len(names) > 1 for name in names}
        for wrong, names in (
            ("lacks", self._shapes.keys() - offered.keys() - optional),
            ("has unknown", offered.keys() - self._shapes.keys() - optional),
            ("has another shape for", {n for n in offered if self._shapes.get(n, offered[n]) != offered[n]}),
        ):
            if names:
                raise ValueError(f"{folder} {wrong} {len(names)} of {len(offered)} tensors: {sorted(names)[:5]}")

    def finish_weight_update(self) -> None:
        """Move the loaded layers into the kernels' own storage."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._renew_tied_layers()

    def _renew_tied_layers(self) -> None:
        """Let tied layers prepare their weight again, as after a start.

        The reload leaves out a layer for which the checkpoint has no tensor of its own. A tied output head sees the
        new values through its tie, but what the CPU build packed from the old ones would go on being used.
        """
        for name, names in self._tied.items():
            layer = self.model.get_submodule(name.rpartition(".")[0])
            if len(names) > 1 and (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def _tied_names(model: torch.nn.Module) -> dict[str, set[str]]:
    """For every parameter's name, all names of that parameter: one of them is enough in a checkpoint."""
    names: dict[int, set[str]] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters:
        names.setdefault(id(parameter), set()).add(name)
    return {name: names[id(parameter)] for name, parameter in parameters}


def _checkpoint(model_config: Any) -> Path:
    """The folder of the model that vLLM started from, in the local cache if it was named by its hub name."""
    if (folder := Path(model_config.model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model_config.model, revision=model_config.revision, local_files_only=True, allow_patterns=SHARDS
        )
    )


def _shards(folder: Path) -> list[Path]:
    if not (shards := sorted(folder.glob(SHARDS))):
        raise FileNotFoundError(f"no {SHARDS} in {folder}: do engine and learner see the same disk?")
    return shards


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes from the headers alone."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for shard in _shards(folder):
        with safe_open(shard, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in the folder's shards, one tensor in memory at a time."""
    from safetensors import safe_open

    for shard in _shards(folder):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
