"""Stages, types, offload, checkpointing, ranks and splits: three steps give the same result within stated bounds.

docs/learner.md has the whole table; the bounds here are some ten times what it measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.equality import Difference, Outcome, Setting, difference, on_two_ranks, outcome
from trainer import deepspeed_settings
from trainer.gradient import methods, sharded_sums

EXACT = Difference(  # float32 against float32
    log_weight=3e-5,
    score_norm=3e-6,
    advantage=1e-5,
    kl=1e-5,
    baseline=1e-5,
    rho=3e-6,
    grad_norm=1e-5,
    update=3e-5,
    weight=1e-6,
)
NEARLY = Difference(  # bfloat16 on one rank, against stage 0 in bfloat16: a weight may be rounded the other way
    log_weight=0.01,
    score_norm=1e-3,
    advantage=1e-3,
    kl=0.01,
    baseline=1e-3,
    rho=1e-3,
    grad_norm=1e-3,
    update=0.01,
    weight=1e-3,
)
REDUCED = Difference(  # bfloat16 on two ranks, against one: each rank's gradient is rounded to bfloat16
    log_weight=0.1,
    score_norm=0.03,
    advantage=0.1,
    kl=0.05,
    baseline=0.1,
    rho=0.05,
    grad_norm=0.1,
    update=0.3,
    weight=3e-3,
)
ROUNDED = Difference(  # bfloat16 against float32: b* follows the squared weights
    log_weight=1.0,
    score_norm=0.2,
    advantage=0.5,
    kl=0.2,
    baseline=0.5,
    rho=0.2,
    grad_norm=0.5,
    update=1.0,
    weight=3e-3,
)

ONE_RANK = {
    "stage 1, offloaded": Setting(zero_stage=1, offload=True),
    "stage 2, offloaded, layers computed again": Setting(zero_stage=2, offload=True, checkpointing=True),
    "stage 3, layers computed again": Setting(zero_stage=3, checkpointing=True),
    "stage 3, offloaded": Setting(zero_stage=3, offload=True),
    "sharded sums, stage 3": Setting(zero_stage=3, method="one_pass_sharded", pack_tokens=30),
    "two passes, stage 0": Setting(method="two_pass", pack_tokens=30),
    "plain, stage 0": Setting(algorithm={"preset": "grpo"}, pack_tokens=30),
    "plain, stage 1, offloaded, a NaN": Setting(
        zero_stage=1, offload=True, algorithm={"preset": "grpo"}, pack_tokens=30, is_poisoned=True
    ),
    "plain, stage 2, layers computed again": Setting(
        zero_stage=2, algorithm={"preset": "otb"}, pack_tokens=30, checkpointing=True
    ),
    "plain, stage 3, offloaded, a NaN": Setting(
        zero_stage=3, offload=True, algorithm={"preset": "grpo"}, pack_tokens=30, is_poisoned=True
    ),
    "streamed, stage 0": Setting(streamed=True),
    "streamed, sharded sums, stage 3": Setting(streamed=True, zero_stage=3, method="one_pass_sharded", pack_tokens=30),
    "streamed, two passes, stage 3, b* of the others": Setting(
        streamed=True, zero_stage=3, algorithm={"preset": "vcpo", "baseline": "opob_leave_one_out"}
    ),
    "streamed, plain, stage 1, offloaded, a NaN": Setting(
        streamed=True, zero_stage=1, offload=True, algorithm={"preset": "grpo"}, pack_tokens=30, is_poisoned=True
    ),
    "streamed, plain, stage 3, layers computed again": Setting(
        streamed=True, zero_stage=3, algorithm={"preset": "grpo"}, pack_tokens=30, checkpointing=True
    ),
    "bfloat16, stage 1, offloaded": Setting(dtype="bfloat16", zero_stage=1, offload=True),
    "bfloat16, stage 2, layers computed again": Setting(dtype="bfloat16", zero_stage=2, checkpointing=True),
    "bfloat16, stage 3, offloaded": Setting(dtype="bfloat16", zero_stage=3, offload=True),
}

TWO_RANKS = {
    "stage 0": Setting(),
    "stage 1, offloaded, layers computed again": Setting(zero_stage=1, offload=True, checkpointing=True),
    "stage 3, layers computed again, packs of unequal number": Setting(
        zero_stage=3, checkpointing=True, pack_tokens=30
    ),
    "the other way round": Setting(zero_stage=1, split="reversed"),
    "dealt out like cards": Setting(zero_stage=2, split="dealt"),
    "all on one rank, stage 3": Setting(zero_stage=3, split="all on one"),
    "a NaN on one rank, stage 3": Setting(zero_stage=3, is_poisoned=True),
    "sharded sums, stage 1": Setting(zero_stage=1, method="one_pass_sharded"),
    "sharded sums, stage 3, packs of unequal number": Setting(zero_stage=3, method="one_pass_sharded", pack_tokens=30),
    "sharded sums, a NaN on one rank": Setting(zero_stage=2, method="one_pass_sharded", is_poisoned=True),
    "two passes, min(b*, mean) of the others, stage 3": Setting(
        zero_stage=3, method="two_pass", algorithm={"preset": "vcpo", "baseline": "opob_safe_leave_one_out"}
    ),
    "two passes, stage 2": Setting(zero_stage=2, method="two_pass"),
    "two passes, stage 3, packs of unequal number": Setting(zero_stage=3, method="two_pass", pack_tokens=30),
    "two passes, fewer groups than ranks": Setting(method="two_pass", num_groups=1),
    "two passes, proxy norms": Setting(
        zero_stage=3, method="two_pass", algorithm={"preset": "vcpo", "baseline_norms": "proxy"}
    ),
    "fewer groups than ranks": Setting(zero_stage=1, num_groups=1),
    "m2po, dealt": Setting(zero_stage=3, split="dealt", algorithm={"preset": "m2po"}),
    "bapo": Setting(zero_stage=1, algorithm={"preset": "bapo"}),
    "otb": Setting(zero_stage=1, algorithm={"preset": "otb"}),
    "proxy norms, stage 3": Setting(zero_stage=3, algorithm={"preset": "vcpo", "baseline_norms": "proxy"}),
    "plain, stage 0, fewer groups than ranks": Setting(num_groups=1, algorithm={"preset": "grpo"}),
    "plain, stage 1": Setting(zero_stage=1, algorithm={"preset": "grpo"}, pack_tokens=30),
    "plain, stage 2, a NaN on one rank": Setting(
        zero_stage=2, algorithm={"preset": "grpo"}, pack_tokens=30, is_poisoned=True
    ),
    "plain, stage 3, offloaded, all on one rank": Setting(
        zero_stage=3, offload=True, algorithm={"preset": "grpo"}, pack_tokens=30, split="all on one"
    ),
    "plain, bfloat16, stage 0, a NaN on one rank": Setting(
        dtype="bfloat16", algorithm={"preset": "grpo"}, pack_tokens=30, is_poisoned=True
    ),
    "plain, bfloat16, stage 2": Setting(dtype="bfloat16", zero_stage=2, algorithm={"preset": "grpo"}, pack_tokens=30),
    "packs divided, stage 0": Setting(sequence_parallel=2, algorithm={"preset": "tis"}),
    "packs divided, stage 2": Setting(zero_stage=2, sequence_parallel=2, algorithm={"preset": "m2po"}),
    "packs divided, stage 3, layers computed again, exact norms": Setting(
        zero_stage=3, checkpointing=True, sequence_parallel=2, pack_tokens=30, method="two_pass"
    ),
    "packs divided, stage 1, proxy norms": Setting(
        zero_stage=1, sequence_parallel=2, method="two_pass", algorithm={"preset": "vcpo", "baseline_norms": "proxy"}
    ),
    "packs divided, stage 3, layers computed again, proxy norms": Setting(
        zero_stage=3,
        checkpointing=True,
        sequence_parallel=2,
        method="one_pass",
        algorithm={"preset": "vcpo", "baseline_norms": "proxy"},
    ),
    "a penalty on adapters, stage 3, packs of unequal number": Setting(
        zero_stage=3,
        pack_tokens=30,
        algorithm={"preset": "tba", "kl_beta": 0.5, "kl_beta_end": None},
        model={"reference": "initial", "lora": {"rank": 2}},
    ),
    "two passes, a penalty, stage 2": Setting(
        zero_stage=2,
        method="two_pass",
        algorithm={"preset": "vcpo", "kl_beta": 0.5},
        model={"reference": "initial"},
    ),
    "packs divided, a penalty, stage 1": Setting(
        zero_stage=1,
        sequence_parallel=2,
        algorithm={"preset": "grpo", "kl_beta": 0.5, "kl": "k2"},
        model={"reference": "initial"},
    ),
    "streamed, stage 1": Setting(streamed=True, zero_stage=1),
    "streamed, sharded sums, stage 3": Setting(streamed=True, zero_stage=3, method="one_pass_sharded", pack_tokens=30),
    "streamed, two passes, stage 2, a NaN on one rank": Setting(
        streamed=True, zero_stage=2, method="two_pass", is_poisoned=True
    ),
    "streamed, plain, stage 2": Setting(streamed=True, zero_stage=2, algorithm={"preset": "grpo"}, pack_tokens=30),
    "streamed, packs divided, stage 1": Setting(
        streamed=True, zero_stage=1, sequence_parallel=2, algorithm={"preset": "tis"}
    ),
    "bfloat16, stage 0": Setting(dtype="bfloat16"),
    "bfloat16, stage 3, offloaded": Setting(dtype="bfloat16", zero_stage=3, offload=True),
}


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """In these tests only, ZeRO-3 divides every weight, and the split over ranks is a setting."""
    from tests.trainer.trainer_builders import divide_small_weights

    monkeypatch.setattr(methods, "share_of_rank", methods.share_of_rank)
    monkeypatch.setattr(sharded_sums, "SMALL", sharded_sums.SMALL)
    monkeypatch.setattr(deepspeed_settings, "deepspeed_config", deepspeed_settings.deepspeed_config)
    divide_small_weights()


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Callable[[Setting], Outcome]:
    """The same steps on one rank in stage 0, with default settings otherwise."""
    found: dict[str, Outcome] = {}

    def made(setting: Setting) -> Outcome:
        plain = replace(
            setting,
            zero_stage=0,
            offload=False,
            checkpointing=False,
            split="own",
            pack_tokens=Setting.pack_tokens,
            sequence_parallel=1,
            streamed=False,
            method="auto" if setting.algorithm.keys() & {"baseline", "kl_beta"} else "one_pass",
        )
        if str(plain) not in found:
            found[str(plain)] = outcome(tiny_model_dir, plain)
        return found[str(plain)]

    return made


@pytest.fixture(scope="module")
def two_ranks(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    out = tmp_path_factory.mktemp("two-ranks") / "outcomes.pt"
    found = on_two_ranks(tiny_model_dir, list(TWO_RANKS.values()), out, timeout_s=500)
    return dict(zip(TWO_RANKS, found, strict=True))


def beyond(found: Difference, bounds: Difference) -> dict[str, float]:
    names = Difference.__annotations__
    return {name: value for name in names if not (value := getattr(found, name)) <= getattr(bounds, name)}


@pytest.mark.parametrize("name", ONE_RANK)
def test_one_rank(tiny_model_dir: Path, reference: Callable[[Setting], Outcome], name: str) -> None:
    setting = ONE_RANK[name]
    bounds = EXACT if setting.dtype == "float32" else NEARLY
    assert beyond(difference(outcome(tiny_model_dir, setting), reference(setting)), bounds) == {}


def test_bfloat16_differs_from_float32_by_its_rounding(reference: Callable[[Setting], Outcome]) -> None:
    found = difference(reference(Setting(dtype="bfloat16")), reference(Setting()))
    assert beyond(found, ROUNDED) == {}
    assert found.log_weight > 1e-3  # it does differ


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(two_ranks: dict[str, Outcome], reference: Callable[[Setting], Outcome], name: str) -> None:
    setting = TWO_RANKS[name]
    bounds = EXACT if setting.dtype == "float32" else REDUCED
    assert beyond(difference(two_ranks[name], reference(setting)), bounds) == {}
