"""The source's metadata and iteration, on plain modules and DeepSpeed engines of every stage, on one and two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from agentrl.engine.checksum import checksum_of
from tests.device import without_gpus
from trainer.weights.source import WeightSource, layer_of


def source_of(module: nn.Module, dtype: torch.dtype = torch.float32) -> WeightSource:
    return WeightSource(module, dtype=dtype)


def test_metadata_says_what_iteration_yields(tiny_model: Any) -> None:
    source = source_of(tiny_model, torch.bfloat16)
    said = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
    assert said == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert source.num_bytes == sum(tensor.nbytes for _, tensor in source)


def test_every_pass_is_a_fresh_one(tiny_model: Any) -> None:
    source = source_of(tiny_model)
    first = checksum_of(source)
    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(3.0)
    assert checksum_of(source) not in (first, checksum_of([]))


def test_tied_parameters_come_once(tiny_model: Any) -> None:
    assert tiny_model.lm_head.weight is tiny_model.model.embed_tokens.weight
    names = [name for name, _ in source_of(tiny_model)]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_only_floating_parameters_are_sent_in_the_engines_dtype() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("bias_of_router", torch.ones(2))
    module.register_buffer("count", torch.ones(2, dtype=torch.int32))
    module.register_buffer("scratch", torch.ones(2), persistent=False)
    assert {meta.name: meta.dtype for meta in source_of(module, torch.bfloat16).metadata()} == {
        "weight": torch.bfloat16,
        "bias": torch.bfloat16,
        "bias_of_router": torch.float32,
        "count": torch.int32,
    }


def test_nothing_yielded_requires_a_gradient(tiny_model: Any) -> None:
    assert not any(tensor.requires_grad for _, tensor in source_of(tiny_model))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.experts.7.w1", "model.layers.3"),
        ("transformer.h.11.attn.weight", "transformer.h.11"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
    ],
)
def test_a_layer_is_named_by_its_outermost_number(name: str, layer: str) -> None:
    assert layer_of(name) == layer


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def gathered(request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank iterated over under each stage, and the folder that rank 0 wrote."""
    out = tmp_path_factory.mktemp("gathered")
    script = Path(__file__).with_name("gathering_ranks.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3]), **without_gpus()}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        env.pop(name, None)
    command = [*launcher, str(script), str(tiny_model_dir), str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = {
        stage: [json.loads((out / f"stage{stage}_rank{rank}.json").read_text()) for rank in range(request.param)]
        for stage in range(4)
    }
    return seen, out


def test_every_stage_yields_the_whole_model_on_every_rank(gathered: Any, tiny_model: Any) -> None:
    seen, _ = gathered
    whole = checksum_of(source_of(tiny_model))
    assert all(rank["before"]["checksum"] == whole for stage in range(4) for rank in seen[stage])


def test_a_step_shows_on_every_rank(gathered: Any, tiny_model: Any) -> None:
    seen, out = gathered
    for stage in range(4):
        stored = load_file(next((out / f"stage{stage}").glob("v0-*/model.safetensors")))
        assert {rank["after"]["checksum"] for rank in seen[stage]} == {checksum_of(stored.items())}
        assert not any(torch.equal(stored[name], tensor) for name, tensor in source_of(tiny_model))


def test_metadata_needs_no_gathering(gathered: Any, tiny_model: Any) -> None:
    seen, _ = gathered
    said = [[meta.name, str(meta.dtype), list(meta.shape)] for meta in source_of(tiny_model).metadata()]
    assert all(rank["after"]["metadata"] == said for stage in range(4) for rank in seen[stage])


def test_zero_3_holds_one_layer_at_a_time(gathered: Any) -> None:
    seen, _ = gathered
    assert [seen[stage][0]["after"]["is_split"] for stage in range(4)] == [False, False, False, True]
    for stage in range(3):
        assert seen[stage][0]["after"]["most_layers_whole"] > 1
    for rank in seen[3]:
        assert rank["after"]["most_layers_whole"] == 1 and rank["after"]["left_whole"] == 0


def test_an_export_from_zero_3_loads(gathered: Any) -> None:
    from transformers import AutoModelForCausalLM

    seen, out = gathered
    model = AutoModelForCausalLM.from_pretrained(out / "export3", dtype="float32")
    assert checksum_of(source_of(model)) == seen[3][0]["after"]["checksum"]
