"""The size of a model, from the headers of its safetensors files in a folder, in the hub's cache, or on the hub."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from agentrl.engine import hub


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameters and bytes of a model's files. Example: `model_size("models/tiny").num_bytes`."""

    num_parameters: int
    num_bytes: int


def model_size(path: str, *, ask_hub: bool = False) -> ModelSize | None:
    """The size of the model at a folder, or of a hub model that was downloaded; None where it is not known.

    Args:
        ask_hub: read the headers on the hub where the model was not downloaded yet.
    """
    folder = Path(path) if Path(path).is_dir() else _downloaded(path)
    files = sorted(folder.glob("*.safetensors")) if folder else []
    if not files:
        return _on_the_hub(path) if ask_hub and folder is None else None
    from safetensors import safe_open

    num_parameters = 0
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            num_parameters += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.offset_keys())
    return ModelSize(num_parameters=num_parameters, num_bytes=sum(file.stat().st_size for file in files))


def _downloaded(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def _on_the_hub(name: str) -> ModelSize | None:
    import httpx
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, NotASafetensorsRepoError

    if not hub.answers():
        return None
    try:
        files = get_safetensors_metadata(name).files_metadata.values()
    except (HfHubHTTPError, HFValidationError, NotASafetensorsRepoError, httpx.HTTPError, OSError):
        return None
    tensors = [tensor for file in files for tensor in file.tensors.values()]
    return ModelSize(
        num_parameters=sum(tensor.parameter_count for tensor in tensors),
        num_bytes=sum(end - start for start, end in (tensor.data_offsets for tensor in tensors)),
    )
