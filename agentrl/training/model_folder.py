"""Whether the model of a config is there, whole and trainable, and which version of which run it is.

Reads small JSON files and loads no weights. Independent of the processes of a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from agentrl.config import Config
from agentrl.engine import hub
from agentrl.engine.model_files import CONFIG, check_files, read_json, why_no_folder
from agentrl.errors import ConfigError
from agentrl.run_folder import OUT_DIR
from agentrl.tokens.vocabulary import check_same_vocabulary

ADAPTER_CONFIG = "adapter_config.json"  # PEFT's
ORIGIN = "agentrl.json"
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys under which a config.json has the experts of a layer."""
QUANTISED = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where an exported model is from: `agentrl.json` in its folder.

    Example: `Origin(run="quickstart", version=40)`.
    """

    run: str
    version: int  # policy version: optimizer steps done


def write_origin(folder: Path, origin: Origin) -> None:
    """Record in a model folder where it is from."""
    (folder / ORIGIN).write_bytes(msgspec.json.encode(origin))


def origin_of(folder: str | Path) -> Origin | None:
    """Where a model folder is from; None for one that no run exported, and for a name on the hub."""
    try:
        return msgspec.json.decode((Path(folder) / ORIGIN).read_bytes(), type=Origin)
    except (OSError, msgspec.MsgspecError):
        return None


def exported_weights(model: str, *, out_dir: str | Path = OUT_DIR) -> str:
    """The model folder that a run exported last, where `model` is the run's folder or name; else `model` itself.

    Raises ConfigError for a run that has exported nothing yet.
    """
    if is_model_folder(Path(model)):
        return model
    run = next((folder for folder in (Path(model), Path(out_dir, model)) if _is_run(folder)), None)
    return model if run is None else str(_last_export(run))


def _last_export(run: Path) -> Path:
    exports = list(run.glob(f"checkpoints/[!.]*/{CONFIG}"))
    if not exports:
        raise ConfigError(
            f"{run} has exported no weights yet: a run writes checkpoints/final at its end, and every "
            "learner.save_every steps checkpoints/step_N"
        )
    return max(exports, key=lambda file: file.stat().st_mtime).parent


def is_model_folder(path: Path) -> bool:
    """Whether `path` is a model folder in Hugging Face layout."""
    return (path / CONFIG).is_file() and not _is_run(path)


def check_model(config: Config, *, must_exist: bool = False) -> None:
    """Raises ConfigError when the model is neither local nor on the hub, or when a file of its folder is not whole.

    Args:
        must_exist: also where the config has a warm start, which would make it.
    """
    name = config.model.path
    if reason := _part_of_a_run(Path(name)):
        raise ConfigError(f"model.path: {reason}")
    if is_model_folder(Path(name)):
        check_files(Path(name))
    elif Path(name).exists() and (config.model.warmstart is None or must_exist or not _is_empty(Path(name))):
        raise ConfigError(f"model.path={name} {why_no_folder(Path(name))}")
    elif config.model.warmstart is not None and must_exist:
        raise ConfigError(f"model.path: there is no {name} yet: `agentrl warmstart CONFIG` makes it")
    elif config.model.warmstart is None:
        if (there := exported_weights(name, out_dir=config.out_dir)) != name:
            raise ConfigError(f"model.path: {name} is a run; its trained weights are in model.path={there}")
        _check_hub(name)


def _check_hub(name: str) -> None:
    """Raises ConfigError unless the hub has the model, or it was downloaded."""
    if name.startswith(("http://", "https://")) or re.fullmatch(r"[\w.-]+:\d+(/.*)?", name):
        url = name if "//" in name else f"http://{name}"
        raise ConfigError(
            f"model.path={name} is an address; to use a server that runs set engine.url={url}, or for `agentrl eval` "
            f"and `agentrl rollout` --model {url}"
        )
    is_name = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if is_name and hub.file_of(name, CONFIG) is not None:
        return
    silent = " (The hub does not answer, or HF_HUB_OFFLINE is set.)" if is_name and not hub.answers() else ""
    raise ConfigError(
        f"model.path: {name!r} is neither a folder with a config.json nor a model on the hub that can be reached."
        f"{silent} Give one of these, or add a model.warmstart section to make a small one from the environment's "
        "demonstrations"
    )


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _part_of_a_run(path: Path) -> str | None:
    """What a folder of a run is that is no model, and which folder is; None for any other path."""
    if (path / ADAPTER_CONFIG).is_file():
        return f"{path} is an adapter, not a model. Give {path.parent}, into which a run has merged it"
    run = next((folder for folder in (path, *path.parents) if _is_run(folder)), None)
    if run is None or (run != path and is_model_folder(path)):
        return None
    return f"{path} is a run's folder, not a model. Give weights that it exported: model.path={_last_export(run)}"


def _is_run(path: Path) -> bool:
    return (path / CONFIG).is_file() and (path / "checkpoints").is_dir() and (path / "trajectories").is_dir()


def check_trainable(config: Config) -> None:
    """Raises ConfigError for a quantised model and for a mixture of experts, which no run can train.

    A model that is not there passes: `check_model` refuses it.
    """
    name = config.model.path
    file = Path(name) / CONFIG if is_model_folder(Path(name)) else None
    if file is None and config.model.warmstart is None:
        file = hub.file_of(name, CONFIG)
    if file is not None and (reason := why_not_trainable(read_json(file))):
        raise ConfigError(f"model.path={name} {reason}")


def check_reference(config: Config) -> None:
    """Raises ConfigError where `model.reference` is no model, or reads token ids in another way than the policy.

    The learner repeats the comparison; here it comes before anything is started. A policy that a warm start has still
    to make passes.
    """
    name, policy = config.model.reference, config.model.path
    if name is None or name == "initial":
        return
    if Path(name).exists() and not is_model_folder(Path(name)):
        raise ConfigError(f"model.reference={name} {why_no_folder(Path(name))}")
    if is_model_folder(Path(policy)) or config.model.warmstart is None:
        check_same_vocabulary(policy, name, key="model.reference")


def why_not_trainable(model_config: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json cannot be trained, and what to take instead; None where nothing speaks against.

    Example:
        >>> why_not_trainable({"model_type": "qwen3"}) is None
        True
    """
    for section in _sections(model_config):
        for key in QUANTISED:
            if section.get(key):
                method = section[key].get("quant_method", "unknown method")
                return (
                    f"is quantised ({key} in its config.json: {method}): the learner trains plain weights, and the "
                    "engine would not find their names in this checkpoint. Take the bfloat16 checkpoint that it was "
                    "made from, with model.dtype=bfloat16"
                )
        for key in NUM_EXPERTS:
            if isinstance(count := section.get(key), int) and count > 1:
                return (
                    f"is a mixture of experts ({key}: {count} in its config.json): transformers fuses the experts' "
                    "weights under names that are not the checkpoint's, so the engine would not find them in an "
                    "update. Take a dense model"
                )
    return None


def _sections(model_config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config, and the configs inside it, such as the text_config of a model with images."""
    yield model_config
    for value in model_config.values():
        if isinstance(value, Mapping):
            yield from _sections(value)
