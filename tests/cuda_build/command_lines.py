"""The command lines of vLLM that every shipped config gives on one GPU and on eight, in the VARIANTS that it can have.

Needs neither GPUs nor the CUDA build: both are pretended.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from agentrl.config import load
from agentrl.engine import vllm_command
from agentrl.engine.gpus import MASK, ORDER, MachineGpu, visible
from agentrl.engine.model_size import ModelSize
from agentrl.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIGS = (*sorted((ROOT / "configs").glob("*.yaml")), ROOT / "configs" / "cluster" / "aime.yaml")
VARIANTS = {
    "safetensors": ["engine.weight_transfer=safetensors"],
    "nccl": ["engine.weight_transfer=nccl"],
    "ipc": ["engine.weight_transfer=ipc"],
    "ipc, sleeping": ["engine.weight_transfer=ipc", "engine.sleep_while_training=true", "rollout.max_lag=0"],
}
"""Overrides that change the command line, by name."""
MACHINES = (1, 8)
"""Their numbers of GPUs: on one, learner and engine share it."""
H100 = MachineGpu(uuid="GPU-0", total_bytes=85 * 10**9)
CHANGING = ("--host", "--port", "--model", "--seed")
"""Flags whose values say nothing about vLLM."""
OF_THE_FOLDER = "HF_HUB_OFFLINE"
"""A variable that depends on whether the model is in the working folder, as the quickstart's is after a training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """One engine of one config. Example: `next(command_lines()).argv[0] == "--model"`."""

    name: str
    """Such as `quickstart, 1 GPU, ipc`."""
    argv: list[str]
    """Without the program."""
    env: dict[str, str]


def command_lines(models: Path | None = None) -> Iterator[CommandLine]:
    """All of them. `models`: a folder with a model of each config's name; default: the paths that the configs have."""
    size = ModelSize(num_parameters=10**9, num_bytes=2 * 10**9)
    with (
        mock.patch.object(vllm_command, "check_version", lambda: ("vllm", "0.32.0")),
        mock.patch.object(vllm_command, "model_size", lambda path, *, ask_hub: size),
    ):
        for path, num_gpus, variant in itertools.product(CONFIGS, MACHINES, VARIANTS):
            with mock.patch.object(vllm_command, "visible_gpus", lambda num=num_gpus: visible([H100] * num, None)):
                found = _of(path, variant, models)
            if found is not None:
                machine = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
                yield CommandLine(name=f"{path.stem}, {machine}, {variant}", argv=found[0], env=found[1])


def _of(path: Path, variant: str, models: Path | None) -> tuple[list[str], dict[str, str]] | None:
    """None where the config cannot have the variant on this machine."""
    try:
        config = load(path, VARIANTS[variant])
        engine = config.engine
        argv, env = vllm_command.command(
            model_path=str(models / Path(config.model.path).name) if models else config.model.path,
            served_name="policy",
            host=engine.host,
            port=8000,
            config=engine,
            max_context=config.rollout.max_context,
            dtype=config.model.dtype,
            seed=config.seed,
            token="token",
            placement=vllm_command.placement_alone(engine) if engine.urls else vllm_command.placement_of(config),
        )
    except ConfigError:
        return None
    argv = argv[argv.index(vllm_command.MODULE) + 1 :]
    return argv, {name: value for name, value in env.items() if name not in ("PATH", MASK, ORDER)}


def arguments(lines: Sequence[CommandLine]) -> dict[str, list[str]]:
    """Every flag and environment variable with its values; numbers are left out, as they say little about vLLM.

    Example:
        arguments(list(command_lines()))["--dtype"] == ["bfloat16", "float32"]
    """
    found: dict[str, set[str]] = {}
    for line in lines:
        for flag, value in (*_pairs(line.argv), *_variables(line.env)):
            values = found.setdefault(flag, set())
            if value is not None and flag not in CHANGING and not _is_number(value):
                values.add(value)
    return {flag: sorted(values) for flag, values in sorted(found.items())}


def _pairs(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    for word, following in itertools.zip_longest(argv, argv[1:]):
        if word.startswith("--"):
            yield word, None if following is None or following.startswith("--") else following


def _variables(env: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    for name, value in env.items():
        if name == OF_THE_FOLDER:
            continue
        yield name, None if name == vllm_command.secrets.ENGINE else value


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
