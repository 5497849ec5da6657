"""One line per check, whatever the check does, and the output for people and for programs."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from agentrl.cli.doctor import checks as doctor_checks
from agentrl.cli.doctor.findings import Check, Finding, FindingStatus, examine, fail, ok, shortened, warn
from agentrl.cli.main import app
from agentrl.errors import ConfigError
from tests.agentrl.conftest import write_tokenizer

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.yaml"


def test_a_complaint_comes_with_its_mend_and_praise_without() -> None:
    with pytest.raises(ValueError, match="do not go together"):
        fail("disk", "full", "")
    with pytest.raises(ValueError, match="do not go together"):
        Finding(name="disk", status=FindingStatus.OK, found="empty", fix="fill it")


async def test_a_check_that_crashes_is_a_line_with_its_reason() -> None:
    found = await examine([Check(name="sums", ask=lambda: [ok("sums", str(1 / 0))])])
    assert [(one.name, one.status) for one in found] == [("sums", FindingStatus.FAIL)]
    assert "ZeroDivisionError" in found[0].found


async def test_an_error_of_ours_speaks_for_itself() -> None:
    def refuse() -> Finding:
        raise ConfigError("model.path: there is none")

    (found,) = await examine([Check(name="model", ask=refuse)])
    assert found.status is FindingStatus.FAIL
    assert found.found == "model.path: there is none"


async def test_a_check_that_hangs_ends_with_its_deadline_and_holds_up_no_other() -> None:
    started = time.monotonic()
    slow = Check(name="slow", ask=lambda: time.sleep(5), deadline_s=0.05)  # type: ignore[arg-type, return-value]
    found = await examine([slow, Check(name="quick", ask=lambda: ok("quick", "fine"))])
    assert time.monotonic() - started < 4
    assert [(one.name, one.status) for one in found] == [("slow", FindingStatus.FAIL), ("quick", FindingStatus.OK)]
    assert "no answer within 0.05 s" in found[0].found


async def test_a_timeout_within_a_check_is_not_taken_for_its_deadline() -> None:
    async def inner() -> Finding:
        raise TimeoutError("the disk said so")

    (found,) = await examine([Check(name="disk", ask=inner)])
    assert "the disk said so" in found.found


async def test_findings_come_in_the_order_of_the_checks() -> None:
    async def late() -> list[Finding]:
        await asyncio.sleep(0.05)
        return [ok("a", "1"), warn("a", "2", "fix")]

    done: list[str] = []
    found = await examine([Check(name="a", ask=late), Check(name="b", ask=lambda: ok("b", "3"))], on_done=done.append)
    assert [one.found for one in found] == ["1", "2", "3"]
    assert done == ["b", "a"]


def test_a_long_reason_is_one_short_line() -> None:
    assert shortened("a\n  b\n") == "a b"
    assert len(shortened("x " * 2000)) == 500


def test_the_machine_alone_has_no_fail_here_and_the_exit_code_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentrl", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 FAIL" in done.stdout
    assert "Not checked: model" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    lines = done.stdout.split("\n\n")[0].splitlines()
    assert len(lines) >= 12
    assert all(line.startswith(("OK ", "WARN ", "FAIL ")) for line in lines)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leaves only the checks of these names, as they are."""

    def leave(*names: str) -> None:
        whole = doctor_checks.checks

        def some(*arguments: Any, **tokens: Any) -> list[Check]:
            return [check for check in whole(*arguments, **tokens) if check.name in names]

        monkeypatch.setattr(doctor_checks, "checks", some)

    return leave


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_a_model_without_template_is_a_fail_and_exit_code_1_in_json(tmp_path: Path, only: Callable[..., None]) -> None:
    only("Python", "model", "chat template")
    write_tokenizer(tmp_path / "broken", None)
    (tmp_path / "broken" / "config.json").write_text("{}")
    (tmp_path / "broken" / "model.bin").touch()
    done = doctor(QUICKSTART, f"model.path={tmp_path / 'broken'}", "model.renderer=template", "--json")
    assert done.exit_code == 1, done.output
    report = json.loads(done.stdout)
    failed = [one for one in report["findings"] if one["status"] == "FAIL"]
    assert report["ok"] is False
    assert [one["name"] for one in failed] == ["chat template"]
    assert "no chat template" in failed[0]["found"]
    assert "model.renderer" in failed[0]["fix"]
    assert "logprob parity" in report["not_checked"][0]


def test_warnings_alone_are_exit_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check(name="disk", ask=lambda: warn("disk", "nearly full", "delete"))]
    monkeypatch.setattr(doctor_checks, "checks", lambda config, **tokens: checks)
    done = doctor()
    assert done.exit_code == 0
    assert done.stdout.startswith("WARN disk: nearly full -> delete\n")


def test_a_config_that_is_wrong_is_a_line_and_the_machine_is_looked_at(only: Callable[..., None]) -> None:
    only("Python")
    done = doctor(QUICKSTART, "lerner.lr=1", "train.steps=five", "rollout.group_size=0")
    assert done.exit_code == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAIL config: ")]
    assert len(lines) == 3 and all("-> correct it" in line for line in lines)
    assert "did you mean learner?" in done.stdout
    assert "OK   Python" in done.stdout
    assert doctor("nowhere.yaml").stdout.startswith("FAIL config: cannot read config nowhere.yaml")


def test_a_token_that_cannot_be_read_is_a_line(only: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    only("Python")
    monkeypatch.setenv("AGENTRL_ENGINE_TOKEN_FILE", "/nowhere/token")
    done = doctor()
    assert done.exit_code == 1
    assert done.stdout.startswith("FAIL engine token: AGENTRL_ENGINE_TOKEN_FILE: cannot read /nowhere/token")


def test_deep_waits_until_what_failed_is_mended(only: Callable[..., None], taken_port: int) -> None:
    only("ports")
    done = doctor(QUICKSTART, f"engine.port={taken_port}", "--deep")
    assert done.exit_code == 1
    assert "FAIL engine.port" in done.stdout
    assert "fix what failed first" in done.stdout
    assert "engine start" not in done.stdout


def test_deep_needs_a_config() -> None:
    done = doctor("--deep")
    assert done.exit_code == 2
    assert "needs a CONFIG" in done.output


def test_a_terminal_gets_a_table_no_wider_than_itself() -> None:
    from rich.console import Console

    from agentrl.cli.doctor import command as cli_doctor

    findings = [ok("Python", "3.11.7"), fail("run folder", "0.1 GiB free " + "in a folder " * 10, "delete " * 20)]
    console = Console(force_terminal=True, width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    cli_doctor._print_findings(console, findings)
    cli_doctor._print_totals(console, findings, ["weight sync"])
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert "→ delete" in shown
    assert "1 OK, 0 WARN, 1 FAIL" in shown
