"""What all our weight-transfer backends inside vLLM share: check names and shapes, load, checksum, renew tied layers.

Independent of how tensors arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.engine.checksum import Checksum

SHARDS = "model*.safetensors"
MAX_UNSUMMED = 4  # tensors kept in memory for the checksum after vLLM has loaded them


class LoadingModel:
    """Replaces vLLM's model while weights are loaded, to compute their checksum. Loading needs nothing else of a
    model.

    Example: `LoadingModel(model, device).load_weights(tensors)`, then `.checksum.hexdigest()`.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.checksum = Checksum()
        self._model = model
        self._device = device

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """vLLM's own, with the same tensors on the model's device."""
        return self._model.load_weights(_summed(self.checksum, weights, self._device))


class Expected:
    """The names and shapes of the checkpoint that the engine started from.

    Must be made before the first update: a reload gives each name a parameter of its own, which hides the ties.

    Example: `Expected(model, model_config).check(shapes_of(folder), str(folder))` raises for another model.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._tied = _tied_names(model)
        self._shapes = shapes_of(_checkpoint(model_config))

    def check(self, offered: dict[str, tuple[int, ...]], source: str) -> None:
        """Raises ValueError, naming `source`, when names and shapes are not the checkpoint's.

        vLLM would keep the old values of missing tensors and only log a line.
        """
        optional = {name for names in self._tied.values() if len(names) > 1 for name in names}
        for wrong, names in (
            ("lacks", self._shapes.keys() - offered.keys() - optional),
            ("has unknown", offered.keys() - self._shapes.keys() - optional),
            ("has another shape for", {n for n in offered if self._shapes.get(n, offered[n]) != offered[n]}),
        ):
            if names:
                raise ValueError(f"{source} {wrong} {len(names)} of {len(offered)} tensors: {sorted(names)[:5]}")

    def renew_tied_layers(self, model: nn.Module) -> None:
        """Let tied layers process their weights again, as after a start.

        vLLM's reload skips a layer for which the checkpoint has no tensor of its own. A tied output head sees the new
        values through its tie, but the CPU build would still use the copy that it packed from the old ones.
        """
        for name, names in self._tied.items():
            layer = model.get_submodule(name.rpartition(".")[0])
            if len(names) > 1 and (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)


def _summed(
    checksum: Checksum, tensors: Iterable[tuple[str, Tensor]], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors, copied to `device`, and computes their checksum there: one core would be slower than the
    copy. On a CPU a thread computes it, while vLLM loads them.
    """
    if device.type != "cpu":
        for name, tensor in tensors:
            tensor = tensor.to(device)
            checksum.add(name, tensor)  # on the stream that brought it
            yield name, tensor
        return
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksum") as executor:
        sums: deque[Future[None]] = deque()
        for name, tensor in tensors:
            sums.append(executor.submit(checksum.add, name, tensor))
            if len(sums) > MAX_UNSUMMED:
                sums.popleft().result()
            yield name, tensor
        for left in sums:
            left.result()


def load(engine: Any, expected: Expected, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights of a vLLM weight-transfer engine's model, and its `checksum`.

    `tensors` must have passed `Expected.check`. A failure here leaves the model half-changed and without a checksum.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    engine.checksum = ""
    initialize_layerwise_reload(engine.model)
    loading = LoadingModel(engine.model, engine.device)
    loading.load_weights(tensors)
    finalize_layerwise_reload(engine.model, engine.model_config)
    expected.renew_tied_layers(engine.model)
    if engine.device.type != "cpu":
        torch.accelerator.synchronize()
    engine.checksum = loading.checksum.hexdigest()


def shards(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face folder. Raises FileNotFoundError."""
    if not (found := sorted(folder.glob(SHARDS))):
        raise FileNotFoundError(f"no {SHARDS} in {folder}: do engine and learner see the same disk?")
    return found


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a folder's tensors, from the headers alone; safetensors refuses a truncated file."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards(folder):
        with safe_open(shard, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of all tensors in the folder's shards, one in memory at a time."""
    from safetensors import safe_open

    for shard in shards(folder):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


def _tied_names(model: nn.Module) -> dict[str, set[str]]:
    """For each parameter name, all names of that parameter: a checkpoint needs only one of them."""
    names: dict[int, set[str]] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters:
        names.setdefault(id(parameter), set()).add(name)
    return {name: names[id(parameter)] for name, parameter in parameters}


def _checkpoint(model_config: Any) -> Path:
    """The folder of the model that vLLM started from; in the local cache if it has a hub name."""
    if (folder := Path(model_config.model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model_config.model, revision=model_config.revision, local_files_only=True, allow_patterns=SHARDS
        )
    )
