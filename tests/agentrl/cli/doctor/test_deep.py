"""The one-step training of doctor: once for real, and its verdict on numbers and failures that a sound machine
lacks."""

import json
import math
import re
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.doctor import plan
from agentrl.cli.doctor.deep import SYNC_FIX, _failed, judged, one_step_train, parity
from agentrl.cli.doctor.findings import FindingStatus
from agentrl.cli.main import app
from agentrl.config import Config, parse
from agentrl.engine.base import Parity, WeightUpdate
from agentrl.errors import SandboxError, WeightSyncError
from agentrl.report.observer import StepReport
from agentrl.run_folder import RunFolder
from agentrl.types import StepOutput
from tests.device import engine_device, engine_settings

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.yaml"
OUTPUT = StepOutput(policy_version=1, metrics={}, parity_max_abs=2e-6, parity_mean_abs=1e-6)


def report(output: StepOutput, *, probe: float | None) -> StepReport:
    """Of a step whose update was measured; `probe`: difference of the probe's logprobs."""
    measured = None if probe is None else Parity(max_abs=probe, mean_abs=probe, kl=0.0)
    update = WeightUpdate(gap_s=0.5, num_bytes=10**6, parity=measured)
    return StepReport(step=1, output=output, update=update, metrics={})


def config(model: Path, **engine: object) -> Config:
    tree = {"name": "t", "env": {"target": "envs.modmath:ModMath"}, "model": {"path": str(model)}, "engine": engine}
    return parse(tree, source="test")


@pytest.mark.parametrize(
    ("probe", "output", "status"),
    [
        (1e-6, OUTPUT, "OK"),
        (1e-3, OUTPUT, "FAIL"),
        (math.inf, OUTPUT, "FAIL"),
        (1e-6, replace(OUTPUT, parity_max_abs=0.1), "WARN"),
        (1e-6, StepOutput(policy_version=1, metrics={}), "WARN"),
    ],
)
def test_logprobs_that_differ_too_much_are_a_fail(probe: float, output: StepOutput, status: str) -> None:
    assert parity(report(output, probe=probe), bound=1e-4).status == status


def test_an_update_without_a_probe_proves_nothing() -> None:
    assert parity(report(OUTPUT, probe=None), bound=1e-4).status is FindingStatus.FAIL


def test_a_step_that_is_refused_and_an_update_without_checksum_are_warnings(tmp_path: Path) -> None:
    refused = report(replace(OUTPUT, skipped=True), probe=0.0)
    reload = config(tmp_path, device=engine_device(), weight_transfer="reload")
    assert [one.status for one in judged(refused, reload, seconds=9.0)] == ["WARN", "WARN", "OK"]


def test_a_failed_weight_sync_says_how_to_fix_the_transfer(tmp_path: Path) -> None:
    run = RunFolder(path=tmp_path)
    failed = _failed(run, WeightSyncError("the engine has another checksum"))
    assert failed.name == "weight sync" and SYNC_FIX in failed.fix and str(run.logs) in failed.fix
    other = _failed(run, SandboxError("it did not start"))
    assert other.name == "one-step train" and SYNC_FIX not in other.fix


async def test_servers_that_others_may_use_are_left_alone(tmp_path: Path) -> None:
    (found,) = await one_step_train(config(tmp_path, url="http://127.0.0.1:9"))
    assert (found.name, found.status) == ("one-step train", FindingStatus.WARN)
    assert "engine.url=null --deep" in found.fix


async def test_a_part_that_does_not_start_is_named_and_its_logs_stay(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (found,) = await one_step_train(config(tiny_model_dir, device=engine_device(), port=taken.getsockname()[1]))
    assert (found.name, found.status) == ("one-step train", FindingStatus.FAIL)
    assert "engine.port: cannot listen" in found.found
    (logs,) = re.findall(r"the logs are in (\S+)", found.fix)
    assert Path(logs).parent.is_dir()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_sound_model_passes_and_leaves_nothing_behind(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (template,) = (one for one in plan.checks(config(tiny_model_dir)) if one.name == "chat template")
    monkeypatch.setattr(plan, "checks", lambda config, **tokens: [template])
    overrides = [
        f"model.path={tiny_model_dir}",
        *(f"engine.{key}={value}" for key, value in engine_settings().items()),
        "engine.start_timeout_s=300",
    ]
    done = CliRunner().invoke(app, ["doctor", str(QUICKSTART), *overrides, "--deep", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["not_checked"] == []
    found = {one["name"]: one for one in report["findings"]}
    assert {one["status"] for one in found.values()} == {"OK"}
    assert list(found)[2:] == ["one-step train", "weight sync", "logprob parity"]
    assert re.search(
        r"versions 0 and 1 taken by safetensors.*one checksum on both sides", found["weight sync"]["found"]
    )
    assert "0.0001 is allowed" in found["logprob parity"]["found"]
    assert list(tmp_path.glob("agentrl-doctor-*")) == []
