"""The formulas of a learner's memory, held to the bytes that a real learner allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.plan.counted_run import NUM_EPISODES, counted
from tests.trainer.trainer_builders import config
from trainer.plan import dry_pass, memory

BELOW, ABOVE = 0.97, 1.1
"""Predicted over counted. Less is a run that dies, more a machine that is refused without need."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights outweigh a pass over four short episodes."""
    import transformers

    settings = transformers.Qwen3Config(
        vocab_size=600,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen3ForCausalLM(settings).save_pretrained(folder)
    return folder


def sections(stage: int, *, dtype: str = "bfloat16", ranks: int = 1, **others: Any) -> dict[str, Any]:
    algorithm = {"rho_base": 1.0, **others.pop("algorithm", {})}
    return {"dtype": dtype, "learner": {"zero_stage": stage, "num_ranks": ranks, **others}, "algorithm": algorithm}


def predicted(model_dir: Path, given: dict[str, Any]) -> dict[str, int]:
    settings = config(model_dir, **given)
    model = dry_pass.planned_model(settings, dry_pass.settings_of(settings, None))
    kinds = memory.pass_kinds(settings.algorithm)
    passes = tuple(dry_pass.measure(model, kind, num_tokens=6 * NUM_EPISODES, longest=6) for kind in kinds)
    total, longest = memory.PROOF_TOKENS
    proof = dry_pass.measure(model, "exact", num_tokens=total, longest=longest)
    found = memory.phases(memory.sizes_of(model, settings), passes, proof=proof, has_scores="exact" in kinds)
    return {phase.name: phase.num_bytes for phase in found}


def check(real: dict[str, int], planned: dict[str, int]) -> None:
    ratios = {name: planned[name] / real[name] for name in real}
    assert all(BELOW <= ratio <= ABOVE for ratio in ratios.values()), ratios


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank(model_dir: Path, tmp_path: Path, stage: int) -> None:
    given = sections(stage)
    check(counted(model_dir, tmp_path, given), predicted(model_dir, given))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_in_float32(model_dir: Path, tmp_path: Path, stage: int) -> None:
    given = sections(stage, dtype="float32")
    check(counted(model_dir, tmp_path, given), predicted(model_dir, given))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{"baseline_norms": "proxy"}, {"preset": "grpo"}], ids=str)
def test_one_sum_less_without_exact_norms(model_dir: Path, tmp_path: Path, algorithm: dict[str, str]) -> None:
    given = sections(1, algorithm=algorithm)
    check(counted(model_dir, tmp_path, given), predicted(model_dir, given))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimizer_is_in_host_memory(model_dir: Path, tmp_path: Path, stage: int) -> None:
    """Here both are host memory: the GPU's part as planned, and 18 bytes a parameter (12 of the optimizer, 4 of the
    gradient, 2 of the weights to send), in the step one temporary tensor more."""
    given = sections(stage, offload_optimizer=True)
    real, planned = counted(model_dir, tmp_path, given), predicted(model_dir, given)
    settings = config(model_dir, **given)
    size = memory.sizes_of(dry_pass.planned_model(settings, dry_pass.settings_of(settings, None)), settings).trained
    host = {"estimate": 18, "hand-over": 18, "step": 22}
    check({name: real[name] for name in host}, {name: planned[name] + each * size for name, each in host.items()})


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks(model_dir: Path, stage: int, tmp_path: Path) -> None:
    """The larger of both ranks, which hold different parts."""
    given = sections(stage, ranks=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    module = ["-m", "tests.trainer.plan.counted_run", str(model_dir), str(tmp_path), json.dumps(given)]
    subprocess.run([*command, *module], check=True, timeout=300)
    both = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    check({name: max(one[name] for one in both) for name in both[0]}, predicted(model_dir, given))
