"""The formulas of a learner's memory, held to the bytes that a real learner allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.plan.counted_run import counted
from tests.trainer.trainer_builders import config
from trainer.gradient.method_choice import possible
from trainer.plan import dry_pass
from trainer.plan.choice import choose
from trainer.plan.needs import gradient_needs, sizes_of

BELOW, ABOVE = 0.96, 1.1
"""Predicted over counted. Less is a run that dies, more a machine that is refused without need."""


MODELS = Path(__file__).parents[2] / "data" / "models"
LENGTH = 6
"""Tokens of an episode that are read; two make a pack, so that each rank has two packs a step."""


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
    learner = {"zero_stage": stage, "num_ranks": ranks, "pack_tokens": 2 * LENGTH, **others}
    return {"dtype": dtype, "learner": learner, "algorithm": algorithm}


def predicted(model_dir: Path, given: dict[str, Any]) -> dict[str, int]:
    settings = config(model_dir, **given, rollout={"max_context": LENGTH, "max_turn_tokens": 4})
    model = dry_pass.planned_model(settings, dry_pass.settings_of(settings, None))
    (method, *_) = possible(settings)
    found = gradient_needs(settings, method, model, dry_pass.measure)
    sizes = {phase.name: phase.num_bytes for phase in found.phases}
    sizes["estimate"] = max(sizes["estimate"], sizes.pop("norms", 0))
    return sizes


def check(real: dict[str, int], planned: dict[str, int], *, above: float = ABOVE, what: object = None) -> None:
    ratios = {name: planned[name] / real[name] for name in real if name in planned}
    assert all(BELOW <= ratio <= above for ratio in ratios.values()), (what, ratios)


PLAIN = {"gradient": "plain", "algorithm": {"preset": "grpo"}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank(model_dir: Path, tmp_path: Path, stage: int) -> None:
    given = sections(stage)
    check(counted(model_dir, tmp_path, given), predicted(model_dir, given))


def test_auto_takes_the_first_method_that_fits(tmp_path: Path) -> None:
    """Two layers of a 7B model, on two ranks: with sums of its size, with half of them, without."""
    model_config = json.loads((MODELS / "qwen2.5-7b.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(model_config))
    settings = config(tmp_path, dtype="bfloat16", learner={"num_ranks": 2, "zero_stage": 2, "pack_tokens": 1024})
    model = dry_pass.planned_model(settings, dry_pass.settings_of(settings, None))
    names = possible(settings)
    assert names == ("one_pass", "one_pass_sharded", "two_pass")
    whole, divided, none = (gradient_needs(settings, name, model, dry_pass.measure).peak_bytes for name in names)
    assert whole > 1.03 * divided > 1.03 * none
    assert choose(settings, None) == choose(settings, 2 * whole) == "one_pass"
    assert choose(settings, round(1.06 * divided)) == "one_pass_sharded"  # 5 % for the allocator
    assert choose(settings, 1) == "two_pass"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "method", [PLAIN, {"gradient": "one_pass"}, {"gradient": "one_pass_sharded"}, {"gradient": "two_pass"}], ids=str
)
def test_every_method_on_one_rank(
    model_dir: Path, tmp_path: Path, stage: int, dtype: str, method: dict[str, Any]
) -> None:
    given = sections(stage, dtype=dtype, **method)
    check(counted(model_dir, tmp_path, given), predicted(model_dir, given))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimizer_is_in_host_memory(model_dir: Path, tmp_path: Path, stage: int) -> None:
    """Here both are host memory: the GPU's part as planned, and what is on the host, in bytes a parameter: 12 of the
    optimizer, 4 of its gradient, 2 of the weights to send, and from the first backward on a copy of the gradient."""
    given = sections(stage, offload_optimizer=True, gradient="one_pass")
    real, planned = counted(model_dir, tmp_path, given), predicted(model_dir, given)
    settings = config(model_dir, **given)
    size = sizes_of(dry_pass.planned_model(settings, dry_pass.settings_of(settings, None)), settings).trained
    host = {"estimate": 20, "hand-over": 20, "step": 24}
    check({name: real[name] for name in host}, {name: planned[name] + each * size for name, each in host.items()})


@pytest.mark.slow
def test_two_ranks(model_dir: Path, tmp_path: Path) -> None:
    """The larger of both ranks, which hold different parts. All in one process each: a start takes longest."""
    methods = ({"gradient": "one_pass"}, PLAIN, {"gradient": "one_pass_sharded"}, {"gradient": "two_pass"})
    given = [sections(stage, ranks=2, **method) for stage in range(4) for method in methods]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    module = ["-m", "tests.trainer.plan.counted_run", str(model_dir), str(tmp_path), json.dumps(given)]
    subprocess.run([*command, *module], check=True, timeout=300)
    for real, one in zip(
        zip(*(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)), strict=True),
        given,
        strict=True,
    ):
        check(
            {name: max(peaks[name] for peaks in real) for name in real[0]},
            predicted(model_dir, one),
            above=1.2,
            what=one,
        )
