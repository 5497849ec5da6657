"""The learner's benchmark on a tiny model: equal gradients, its own arithmetic, the pipe to a child."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks import reporting  # noqa: E402
from benchmarks.learner import engine_steps, report, run  # noqa: E402
from trainer.gpu_report import meter, methods, workload  # noqa: E402
from trainer.gpu_report.workload import Lengths  # noqa: E402

CPU = torch.device("cpu")
LENGTHS = Lengths(num_groups=2, group_size=4, tokens=24, is_mixed=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cell")
    workload.save(made, "tiny", LENGTHS, CPU)
    return made


def gradient(folder: Path, name: str) -> Any:
    make = engine_steps.make if name in engine_steps.SETTINGS else methods.make
    step = make(name, workload.load_model(folder, CPU), workload.load(folder))
    step()  # a second step starts with nothing of the first
    return [one.clone() for one in step()]


@pytest.mark.parametrize(
    ("ours", "theirs"), [(ours, theirs) for ours, theirs in run.AGAINST.items() if ours != run.TRL], ids=str
)
def test_methods_that_say_the_same_make_the_same_gradient(folder: Path, ours: str, theirs: str) -> None:
    assert methods.relative_error(gradient(folder, ours), gradient(folder, theirs)) < 1e-4


def test_the_proxys_gradient_is_autograds_with_its_weights_and_baseline(folder: Path) -> None:
    model, samples = workload.load_model(folder, CPU), workload.load(folder)
    step = methods.Ours(model, samples, methods.ALGORITHMS["vcpo proxy"])
    ours = [one.clone() for one in step()]
    shares = [one.weight * one.advantage / len(samples) for group in step.stats for one in group.trajectories]
    assert methods.relative_error(ours, methods.Plain(model, samples).weighted(shares)) < 1e-5


def test_the_exact_baseline_is_not_the_references_twice_weighted_or_mean_one(folder: Path) -> None:
    """The methods differ where they should: a wrong baseline would be seen."""
    assert methods.relative_error(gradient(folder, "vcpo proxy"), gradient(folder, methods.REFERENCE)) > 1e-3


def test_mixed_lengths_are_the_quantiles_of_a_log_normal_distribution() -> None:
    lengths = Lengths(num_groups=8, group_size=8, tokens=100, is_mixed=True).of_each()
    assert sorted(lengths)[31:33] == [98, 102] and len(lengths) == 64
    assert max(lengths) == pytest.approx(100 * 2.718281828**2.418, rel=0.01)


def test_operations_are_those_counted_by_hand(folder: Path) -> None:
    class Config:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads, head_dim = 10, 4, 2, 2, 8

    one = workload.load(folder)[0]
    tokens, actions = len(one.ids_T), int(one.acted_T.sum())
    by_hand = 6 * 60 * tokens + 6 * 40 * actions + 2 * 2 * 8 * 6 * tokens**2
    assert workload.num_flops(Config, [one], 100) == by_hand


@pytest.mark.timeout(400)  # it imports all there is, on a machine that may be busy
def test_a_child_answers_with_seconds_peak_and_its_gradient(folder: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.learner.child", methods.PLAIN]
    lines = f"load {folder}\ncheck {folder / 'out.pt'}\ntime\nceiling\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=reporting.ROOT, timeout=390)
    _, first, second, ceiling = map(json.loads, done.stdout.splitlines())
    assert first["seconds"] > 0 and second["seconds"] > 0 and ceiling["flops_per_s"] > 1e8
    assert first["peak_bytes"] >= 0
    theirs = torch.load(folder / "out.pt", weights_only=True)
    assert methods.relative_error(gradient(folder, methods.PLAIN), theirs) < 1e-6


def test_the_peak_is_that_of_the_step_alone(tmp_path: Path) -> None:
    torch.ones(60 * 2**20)
    answer = meter.checked(lambda: [torch.ones(20 * 2**20)], tmp_path / "out.pt", CPU)
    assert 70 * 2**20 < answer["peak_bytes"] < 110 * 2**20


def test_a_report_has_ratios_within_rounds_and_keeps_what_was_measured_before(tmp_path: Path) -> None:
    cell = run.Cell(
        size="1M",
        length="mixed",
        device="cpu",
        num_threads=1,
        num_parameters=2**18,
        lengths=[100, 300],
        padding=1.5,
        num_flops=4e9,
        ceiling_flops_per_s=[1e10, 2e10],
        header=reporting.header("cell", {}),
    )
    for name, seconds in {
        methods.PLAIN: [1.0, 2.0],
        "ours, no norms": [1.0, 2.0],
        "vcpo exact": [1.1, 2.2],
        methods.REFERENCE: [6.6, 13.2],
    }.items():
        cell.results[name] = run.Result(peak_bytes=2**20 * len(name), seconds=seconds)
    assert report.ratios(cell, "vcpo exact", methods.PLAIN) == pytest.approx([1.1, 1.1])
    assert report.ceiling_shares(cell, methods.PLAIN) == pytest.approx([0.4, 0.1])
    run.save(tmp_path / "cells.json", {cell.name: cell})
    (again,) = run.load(tmp_path / "cells.json").values()
    assert again == cell
    assert "| cpu 1M mixed | 1.10: met | 6.0: **missed** |" in report.text([again])
