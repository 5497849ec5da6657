"""`agentrl doctor CONFIG --plan`: the shipped configs fit what they name, small machines get a setting that fits."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli.doctor.findings import FindingStatus
from agentrl.cli.doctor.plan import ask, command, report
from agentrl.cli.doctor.plan.cards import MIB, asked_cards, found_card
from agentrl.cli.doctor.plan.engine_memory import engine_needs
from agentrl.cli.doctor.plan.planning import Plan, make_plan
from agentrl.cli.doctor.plan.records import LearnerNeeds, ModelShape
from agentrl.cli.doctor.plan.search import Change, changes, nearest
from agentrl.cli.main import app
from agentrl.config import Config, load
from agentrl.engine import hub
from agentrl.errors import ConfigError
from tests.agentrl.conftest import pretend_gpus
from trainer.plan.__main__ import answers

ROOT = Path(__file__).parents[4]
CONFIGS = ROOT / "configs"
SHIPPED = sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("*/*.yaml")])
MODELS = ROOT / "tests" / "data" / "models"
KNOWN: dict[str, LearnerNeeds] = {}
QWEN3 = ModelShape(
    num_parameters=1_720_574_976,
    num_trained=1_720_574_976,
    num_layers=28,
    num_kv_heads=8,
    head_size=128,
    vocab_size=151_936,
)


def model_config(config: Config) -> Path | None:
    """The model's own config.json, which Qwen published; None where the warm start makes the model."""
    if config.model.warmstart is not None:
        return None
    return MODELS / f"{Path(config.model.path).name.lower()}.json"


def here(configs: Sequence[Config]) -> list[LearnerNeeds]:
    """The learner's half in this process, which has torch already, once for each config."""
    keys = [f"{one.model} {one.learner} {one.algorithm} {one.rollout.max_context}" for one in configs]
    new = {key: one for key, one in zip(keys, configs, strict=True) if key not in KNOWN}
    if new:
        KNOWN.update(zip(new, answers(list(new.values()), model_config(configs[0])), strict=True))
    return [KNOWN[key] for key in keys]


def plan_of(name: str, gpus: str, *overrides: str, mean_tokens: int | None = None) -> tuple[Config, Plan]:
    config = load(CONFIGS / f"{name}.yaml", overrides)
    return config, make_plan(config, here([config])[0], asked_cards(gpus), mean_tokens=mean_tokens)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_fits_the_machine_that_its_header_names(path: Path) -> None:
    header = path.read_text().partition("\nname:")[0]
    (gpus,) = re.findall(rf"agentrl doctor {path.relative_to(ROOT)} --plan --gpus (\w+)", header)
    _, plan = plan_of(str(path.relative_to(CONFIGS).with_suffix("")), gpus)
    assert plan.fits and not plan.warnings, (plan.problems, plan.warnings)
    (peak,) = re.findall(r"([\d.]+) GB of [\d.]+", " ".join(header.replace("#", "").split()))
    peaks = [gpu.peak.num_bytes / 1e9 for gpu in plan.gpus if any("rank" in role for role in gpu.roles)]
    assert max(peaks) == pytest.approx(float(peak), abs=0.06), "the header has other numbers than the plan"


def test_a_learner_that_gets_no_room_is_told_what_to_write() -> None:
    """Exact norms of a 7B model on GPUs of 80 GB, and two float32 sums demanded on every rank."""
    config, plan = plan_of("cluster/aime", "8x80", "learner.gradient=one_pass")
    assert not plan.fits and "estimate" in plan.problems[0]
    cards = asked_cards("8x80")
    found = nearest(config, cards, here)
    assert found is not None
    change, fitting = found
    assert str(change) == "learner.gradient=auto" and fitting.fits
    line = report.finding(plan, found)
    assert line.status is FindingStatus.FAIL and "learner.gradient=auto" in line.fix


def test_auto_takes_the_first_gradient_method_that_fits() -> None:
    """A 7B model: two whole sums where there is room for 61 GB of them, else their parts."""
    large, small = plan_of("aime_8gpu", "8x141")[1], plan_of("aime_8gpu", "8x80")[1]
    assert [one.method for one in small.learner.methods] == ["one_pass", "one_pass_sharded", "two_pass"]
    assert (large.gradient.method, small.gradient.method) == ("one_pass", "one_pass_sharded")
    assert small.fits


@pytest.mark.slow
def test_what_fits_on_small_gpus_is_offload_an_adapter_or_nothing() -> None:
    config, plan = plan_of("aime_8gpu", "8x11")
    nearest_on = {gpus: nearest(config, asked_cards(gpus), here) for gpus in ("8x24", "8x22", "8x11")}
    changes = [None if found is None else str(found[0]) for found in nearest_on.values()]
    assert changes == ["learner.offload_optimizer=true", "model.lora={}", None]
    assert report.lines(plan, None)[-1] == report.NOTHING


def test_an_engine_that_only_evaluates_has_gpus_of_its_own() -> None:
    config, plan = plan_of("aime_8gpu", "8x80", "eval.engines=1", "engine.replicas=3", "learner.num_ranks=4")
    assert [gpu.roles for gpu in plan.gpus[4:]] == [(f"engine {at}",) for at in range(3)] + [
        ("engine for evaluations",)
    ]
    splits = [one.values for one in changes(config, num_gpus=8) if "engine.replicas" in one.values]
    assert all(int(one["engine.replicas"]) + int(one["learner.num_ranks"]) <= 7 for one in splits)
    with pytest.raises(ConfigError, match=r"eval\.engines"):
        plan_of("aime_8gpu", "8x80", "eval.engines=9")


def test_changes_begin_with_the_cheapest_and_each_key_exists() -> None:
    config = load(CONFIGS / "aime_8gpu.yaml", ["learner.gradient_checkpointing=false"])
    found = list(changes(config, num_gpus=8))
    assert [one.cost for one in found] == sorted(one.cost for one in found)
    assert str(found[0]) == "learner.gradient_checkpointing=true"
    assert found[0].applied(config).learner.gradient_checkpointing
    with pytest.raises(ConfigError, match="offload_optimizer needs"):
        Change(values={"learner.offload_optimizer": True, "learner.zero_stage": 0}, cost=1).applied(config)


def test_more_sequences_than_contexts_are_a_warning() -> None:
    _, plan = plan_of("aime_1gpu", "1x80", "engine.max_num_seqs=128", mean_tokens=3072)
    assert plan.fits and "Set engine.max_num_seqs=48" in plan.warnings[0]
    assert report.finding(plan, None).status is FindingStatus.WARN


def test_a_context_longer_than_the_cache_does_not_fit() -> None:
    _, plan = plan_of("aime_1gpu", "1x80", "engine.gpu_memory_fraction=0.07")
    assert "one context of 8192 tokens takes 0.94" in plan.problems[-1]


def test_the_engine_s_numbers_by_hand() -> None:
    """85,520,809,984 bytes x 0.3 x 0.9 = 23.09e9, less 1 GiB and the weights: 18.58e9 bytes of 114,688 a token."""
    config = load(CONFIGS / "aime_1gpu.yaml", ["engine.gpu_memory_fraction=0.3"])
    (card,) = asked_cards("1x80")
    needs = engine_needs(config, QWEN3, card, is_shared=True, mean_tokens=3072)
    assert needs.kv_bytes_per_token == 2 * 28 * 8 * 128 * 2 == 114_688
    assert needs.kv_bytes == pytest.approx(18.58e9, rel=1e-3)
    assert (needs.full_contexts, needs.mean_contexts) == (19, 52)
    assert QWEN3.kv_bytes_per_token(2, tensor_parallel=4) == 114_688 // 4
    assert QWEN3.kv_bytes_per_token(2, tensor_parallel=16) == 114_688 // 8


def test_an_engine_that_sleeps_leaves_its_memory_to_the_step() -> None:
    awake = plan_of("aime_1gpu", "1x80", "rollout.max_lag=0")[1]
    asleep = plan_of("aime_1gpu", "1x80", "rollout.max_lag=0", "engine.sleep_while_training=true")[1]
    steps = [next(one for one in plan.gpus[0].phases if one.name == "step") for plan in (awake, asleep)]
    assert steps[1].engine == 2 * 2**30 < steps[0].engine
    assert steps[1].learner == steps[0].learner


def test_a_step_takes_less_time_on_more_ranks() -> None:
    four = plan_of("aime_8gpu", "8x141", "learner.num_ranks=4", "engine.replicas=4")[1].time
    five = plan_of("aime_8gpu", "8x141")[1].time
    assert four.learner_s and five.learner_s and four.learner_s == pytest.approx(five.learner_s * 5 / 4)
    assert 0 < (five.mfu or 0) < 0.7
    assert plan_of("quickstart", "1x24")[1].time.learner_s is None  # float32


def test_replayed_groups_cost_the_learner_and_surplus_episodes_the_engines() -> None:
    replay = ["rollout.replay={recent: 0.5, multiplier: 1.5}"]
    plain, more = (plan_of("aime_8gpu", "8x141", *overrides)[1].time for overrides in ([], replay))
    assert plain.learner_s and plain.generation_s
    assert more.learner_s == pytest.approx(2 * plain.learner_s)
    assert more.generation_s == pytest.approx(1.5 * plain.generation_s)


@pytest.mark.parametrize(
    ("asked", "name", "count"),
    [("8x80", "H100", 8), ("1x80GB", "H100", 1), ("2xh200", "H200", 2), ("3x11", "11 GB", 3)],
)
def test_gpus_by_size_or_by_name(asked: str, name: str, count: int) -> None:
    cards = asked_cards(asked)
    assert ({card.name for card in cards}, len(cards)) == ({name}, count)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("8", "write how many and of what size"),
        ("x80", "write how many and of what size"),
        ("0x80", "1 to 64 GPUs"),
        ("8xV101", "not a known card"),
        ("1x2", "no size of a GPU"),
        ("8x80,2x40", "write how many and of what size"),
    ],
)
def test_other_machines_are_refused(asked: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        asked_cards(asked)


def test_a_card_is_known_by_nvidia_smi_s_name_and_size() -> None:
    assert found_card("NVIDIA A100-SXM4-40GB", 40960 * MIB).name == "A100-40"
    assert found_card("NVIDIA A100-SXM4-80GB", 81920 * MIB).size == 80
    unknown = found_card("NVIDIA T4", 15 * 2**30)
    assert (unknown.flop_per_s, unknown.total_bytes) == (None, 15 * 2**30)


def test_more_gpus_than_the_machine_has_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"learner.num_ranks|engine.replicas"):
        plan_of("aime_8gpu", "4x141")


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "160"})


def test_the_command_prints_tables_and_ends_with_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the learner's half in a process of its own, as users run it."""
    config = CONFIGS / "aime_1gpu.yaml"
    asked = ["--plan", "--gpus", "1x80", "--model-config", MODELS / "qwen3-1.7b.json"]
    fits = run(config, *asked)
    assert fits.exit_code == 0 and "It fits." in fits.output, fits.output
    for name in ("load", "prove", "start", "estimate", "hand-over", "step", "publish", "generate"):
        assert re.search(rf"^{name} +\d", fits.output, re.MULTILINE), name
    assert "/dev/shm" in fits.output and "host memory" in fits.output and "a step takes at least" in fits.output
    monkeypatch.setattr(command, "learner_needs", lambda configs, *, model_config: here(configs))
    too_small = run(config, *asked, "learner.gradient_checkpointing=false", "--json")
    told = json.loads(too_small.output)
    assert too_small.exit_code == 1 and not told["fits"] and told["problems"]
    assert told["nearest"] == {"learner.gradient_checkpointing": True}


def test_without_a_gpu_it_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 0)
    refused = run(CONFIGS / "aime_1gpu.yaml", "--plan")
    assert refused.exit_code == 2 and "--gpus 8x80" in refused.output


@pytest.mark.parametrize("asked", [["--plan"], ["--gpus", "1x80"], [CONFIGS / "quickstart.yaml", "--plan", "--deep"]])
def test_options_that_do_not_go_together(asked: list[Any]) -> None:
    assert run(*asked).exit_code == 2


def test_a_model_without_a_config_file_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(CONFIGS / "aime_1gpu.yaml", [f"model.path={tmp_path}"])
    with pytest.raises(ConfigError, match="--model-config FILE"):
        ask.model_config_file(config, None)
    with pytest.raises(ConfigError, match="there is no such file"):
        ask.model_config_file(config, tmp_path / "config.json")
    monkeypatch.setattr(hub, "answers", lambda: False)
    with pytest.raises(ConfigError, match=r"hf download Qwen/Qwen9"):
        ask.model_config_file(load(CONFIGS / "aime_1gpu.yaml", ["model.path=Qwen/Qwen9"]), None)
    (tmp_path / "config.json").write_text("{}")
    assert ask.model_config_file(config, None) == ask.model_config_file(config, tmp_path) == tmp_path / "config.json"


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load(CONFIGS / "aime_1gpu.yaml")
    with pytest.raises(ConfigError, match="no config of a model"):
        ask.learner_needs([config], model_config=tmp_path / "config.json")


def test_doctor_has_the_verdict_as_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.cli.doctor.checks import checks

    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(command, "learner_needs", lambda configs, *, model_config: here(configs))
    monkeypatch.setattr(command, "model_config_file", partial(lambda config, given: model_config(config)))
    monkeypatch.setattr(command, "read_gpus", list)
    config = load(CONFIGS / "aime_1gpu.yaml", ["learner.gradient_checkpointing=false"])
    (check,) = (one for one in checks(config) if one.name == "memory plan")
    (line,) = check.ask()  # type: ignore[misc, union-attr]
    assert line.status is FindingStatus.FAIL and "learner.gradient_checkpointing=true" in line.fix
