"""Runs inside the CUDA build, without a GPU: imports it, and has vLLM parse and resolve our command lines.

A pretended H100 answers vLLM's questions about the platform (libcuda.c answers those of the libraries). As a pytest
plugin (`-p tests.cuda_build.probe`) it pretends the same for the contract tests. Prints one JSON object.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

from tests.cuda_build.command_lines import MACHINES, CommandLine, command_lines

IMPORTS = (
    "torch",
    "deepspeed",
    "flashinfer",
    "vllm",
    "vllm._C_stable_libtorch",
    "vllm.platforms.cuda",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flashinfer",
)
VERSIONS = ("vllm", "torch", "triton", "flashinfer-python", "deepspeed", "transformers", "cuda-bindings")
CARDS = {"8.0": "A100", "8.9": "L40S, RTX 4090", "9.0": "H100, H200", "10.0": "B200", "12.0": "RTX 5090, RTX PRO 6000"}
"""Names by compute capability."""
H100_BYTES = 85_520_809_984
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
FILES = Path(__file__).parents[1] / "data" / "models"
MODELS = {
    "Qwen2.5-7B": (FILES / "qwen2.5-7b.json").read_text(),
    "Qwen3-1.7B": (FILES / "qwen3-1.7b.json").read_text(),
    "modmath-tiny": json.dumps(TINY),
}
"""The config.json of each config's model, by the last part of model.path."""


def pretend_h100() -> None:
    """Make vLLM see eight H100."""
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    answers = {
        "get_device_capability": DeviceCapability(9, 0),
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_total_memory": H100_BYTES,
        "device_count": max(MACHINES),
    }
    for name, answer in answers.items():
        setattr(NonNvmlCudaPlatform, name, classmethod(lambda cls, *_, answer=answer, **__: answer))
    platforms._current_platform = NonNvmlCudaPlatform()  # type: ignore[attr-defined]


def pytest_configure() -> None:
    """Called by pytest for its plugins."""
    pretend_h100()


def write_models(folder: Path) -> None:
    """Folders with a config.json each: all that vLLM reads of a model before it loads it."""
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config)


def resolved(line: CommandLine) -> dict[str, Any]:
    """Parse and resolve one command line as vLLM's server does; what it chose."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.selector import get_attn_backend

    with mock.patch.dict(os.environ, line.env):
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(line.argv)
        validate_parsed_serve_args(args)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        model = config.model_config
        with set_current_vllm_config(config):
            attention = get_attn_backend(model.get_head_size(), model.dtype, config.cache_config.cache_dtype)
    return {
        "device": config.device_config.device_type,
        "dtype": str(model.dtype),
        "head_dtype": str(model.head_dtype),
        "attention": attention.get_name(),
        "model_runner": "v2" if config.use_v2_model_runner else "v1",
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "cuda_graphs": config.compilation_config.cudagraph_mode.name,
        "weight_transfer": config.weight_transfer_config.backend,
        "logprobs": model.logprobs_mode,
    }


def attention_by_card(folder: Path) -> dict[str, dict[str, str]]:
    """The attention backend that vLLM chooses on each of CARDS, by dtype."""
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import _cached_get_attn_backend

    lines = [line for line in command_lines(folder) if line.name in ("quickstart, 1 GPU, ipc", "aime_1gpu, 1 GPU, ipc")]
    chosen = {}
    for capability, names in CARDS.items():
        answer = DeviceCapability(*map(int, capability.split(".")))
        asked = classmethod(lambda cls, *_, answer=answer, **__: answer)
        with mock.patch.object(NonNvmlCudaPlatform, "get_device_capability", asked):
            _cached_get_attn_backend.cache_clear()
            found = [resolved(line) for line in lines]
        chosen[f"{capability}: {names}"] = {one["dtype"]: one["attention"] for one in found}
    return chosen


def main() -> None:
    """Import, pretend, resolve, print."""
    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    pretend_h100()  # first: other modules of vLLM keep the platform that they see when they are imported
    for name in IMPORTS:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        chosen = {line.name: resolved(line) for line in command_lines(Path(folder))}
        attention = attention_by_card(Path(folder))
    versions = {name: metadata.version(name) for name in VERSIONS}
    found = {"versions": versions, "imports": IMPORTS, "resolved": chosen, "attention_by_card": attention}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
