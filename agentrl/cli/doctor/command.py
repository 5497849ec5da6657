"""`agentrl doctor`: reports what works and what does not, of this machine and of a config on it, one line each."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from agentrl.cli.options import Debug, Overrides, guarded, run
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from agentrl.cli.doctor.findings import Finding
    from agentrl.cli.doctor.gpu_report import ReportRequest
    from agentrl.config import Config

WITHOUT_CONFIG = "model, template, ports, weight sync and logprob parity: give a CONFIG, e.g. configs/quickstart.yaml"
WITHOUT_DEEP = "weight sync and logprob parity of engine and learner: --deep trains one step (half a minute, or more)"
AFTER_A_FAIL = "weight sync and logprob parity of engine and learner: fix what failed first"
INTERRUPTED = "nothing was left running"
NAME_WIDTH = 15  # so that the findings of --deep are aligned with the others
STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


def doctor(
    config_path: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file; without it only the machine is checked.")
    ] = None,
    overrides: Overrides = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Train one step with the config, and compare checksum and logprobs.")
    ] = False,
    gpu_report: Annotated[
        Path | None,
        typer.Option("--gpu-report", metavar="FILE", help="Measure this GPU machine, at most 45 minutes, into a JSON."),
    ] = None,
    again: Annotated[
        list[str] | None, typer.Option("--again", metavar="CELL", help="Measure a cell that the report has already.")
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="The report's cells with tiny shapes on the CPU: do they work?")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what each GPU and the machine must hold. Nothing is started.")
    ] = False,
    gpus: Annotated[
        str | None, typer.Option(help="--plan: for 8x80 (GB each) or 8xH100; default: this machine's GPUs.")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="--plan: the model's config.json, where neither it nor the hub is here.")
    ] = None,
    mean_tokens: Annotated[
        int | None, typer.Option(min=1, help="--plan: tokens of an episode; default: a quarter of max_context.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    debug: Debug = False,
) -> None:
    """Report what would prevent a run here, and how to fix it. Exit code 1 where anything is a FAIL."""
    if deep and config_path is None and gpu_report is None:
        raise typer.BadParameter("--deep needs a CONFIG: it trains one step with it")
    if (again or cpu) and gpu_report is None:
        raise typer.BadParameter("--again and --cpu belong to --gpu-report FILE")
    asked = None if gpu_report is None else _asked(gpu_report, again or [], cpu=cpu, debug=debug)
    _check_plan_options(config_path, plan=plan, deep=deep, others=(gpus, model_config, mean_tokens))
    if plan and config_path is not None:
        raise typer.Exit(_planned(config_path, overrides or [], gpus, model_config, mean_tokens, as_json, debug))
    findings = _checked(config_path, overrides or [], deep=deep, as_json=as_json, debug=debug)
    failed = _has_failed(findings)
    if asked is not None:
        failed |= _measured(asked, findings, debug=debug, quiet=as_json)
    raise typer.Exit(int(failed))


def _checked(path: Path | None, overrides: Sequence[str], *, deep: bool, as_json: bool, debug: bool) -> list[Finding]:
    """Examine the machine and the config, and print what was found."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    with _quiet(debug), redirect_stdout(sys.stderr) if as_json else nullcontext():  # environments may print
        config, findings = _config(path, overrides)
        findings += run(_examined(config, _Waiting(console, quiet=as_json)), debug=debug, interrupted=INTERRUPTED)
    if not as_json:
        _print_findings(console, findings)
    left_out = _left_out(config, findings, deep=deep)
    if config and not left_out:
        with _quiet(debug):
            tried = run(_tried(config, _Waiting(console, quiet=as_json)), debug=debug, interrupted=INTERRUPTED)
        findings += tried
        if not as_json:
            _print_findings(console, tried)
    if as_json:
        report = {
            "ok": not _has_failed(findings),
            "findings": [asdict(one) for one in findings],
            "not_checked": left_out,
        }
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        _print_totals(console, findings, left_out)
    return findings


def _asked(path: Path, again: Sequence[str], *, cpu: bool, debug: bool) -> ReportRequest:
    """The GPU report to make. Ends the command where there is no GPU, before anything is checked."""
    from agentrl.cli.doctor.gpu_report import ReportRequest, device_of_report

    device = guarded(lambda: device_of_report(cpu=cpu), debug=debug)
    return ReportRequest(path=path, device=device, again=tuple(again))


def _measured(asked: ReportRequest, findings: Sequence[Finding], *, debug: bool, quiet: bool) -> bool:
    """Write the GPU report; whether a cell failed. The checks before it do not prevent it."""
    from rich.console import Console

    from agentrl.cli.doctor import gpu_report

    kept = f"the finished cells are in {asked.path}; the same command goes on from there"
    work = gpu_report.shown(asked, Console(highlight=False, quiet=quiet), findings=findings)
    return gpu_report.has_failed(run(work, debug=debug, interrupted=kept))


def _check_plan_options(config: Path | None, *, plan: bool, deep: bool, others: Sequence[object]) -> None:
    if plan and config is None:
        raise typer.BadParameter("--plan needs a CONFIG: e.g. configs/aime_1gpu.yaml")
    if plan and deep:
        raise typer.BadParameter("--plan starts nothing and --deep trains one step: give one of them")
    if not plan and any(one is not None for one in others):
        raise typer.BadParameter("--gpus, --model-config and --mean-tokens belong to --plan")


def _planned(
    path: Path,
    overrides: Sequence[str],
    gpus: str | None,
    model_config: Path | None,
    mean_tokens: int | None,
    as_json: bool,
    debug: bool,
) -> int:
    from agentrl import config as configs
    from agentrl.cli.doctor.plan.command import show_plan

    def work() -> int:
        config = configs.load(path, overrides)
        return show_plan(config, gpus=gpus, model_config=model_config, mean_tokens=mean_tokens, as_json=as_json)

    return guarded(work, debug=debug)


def _left_out(config: Config | None, findings: Sequence[Finding], *, deep: bool) -> list[str]:
    """What is not checked, and why; empty where engine and learner are tested next."""
    if config is None:
        return [WITHOUT_CONFIG]
    if not deep:
        return [WITHOUT_DEEP]
    return [AFTER_A_FAIL] if _has_failed(findings) else []


@contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    """Suppress the warnings of parts: their findings contain them."""
    log = logging.getLogger("agentrl")
    level = log.level
    log.setLevel(level if debug else logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _config(path: Path | None, overrides: Sequence[str]) -> tuple[Config | None, list[Finding]]:
    """The config. Each problem of one that cannot be read is a finding, and the machine is checked anyway."""
    from agentrl import config as configs
    from agentrl.cli.doctor.findings import fail, ok, shortened

    if path is None:
        return None, []
    try:
        return configs.load(path, overrides), [ok("config", f"{path} is valid")]
    except ConfigError as error:
        problems = error.problems if isinstance(error, configs.InvalidConfig) else [str(error)]
        return None, [fail("config", shortened(one), "correct it; only the machine was checked") for one in problems]


def _has_failed(findings: Sequence[Finding]) -> bool:
    return any(one.status == "FAIL" for one in findings)


class _Waiting:
    """In a terminal, shows in one line what doctor waits for."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._width = console.width
        self._status = console.status("") if console.is_terminal and not quiet else None

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status:
            self._status.stop()

    def say(self, text: str) -> None:
        """Replace the line."""
        from rich.text import Text

        if self._status:
            self._status.update(Text(text[: self._width - 4]))


async def _examined(config: Config | None, waiting: _Waiting) -> list[Finding]:
    from agentrl.cli.doctor import checks as doctor_checks
    from agentrl.cli.doctor.findings import crashed, examine
    from agentrl.supervision import secrets

    found: list[Finding] = []
    given: dict[str, str | None] = {}
    for key, name in (("engine_token", secrets.ENGINE), ("sandbox_token", secrets.SANDBOX)):
        try:
            given[key] = secrets.read(name, os.environ)
        except ConfigError as error:
            found.append(crashed(key.replace("_", " "), error))
    checks = doctor_checks.checks(config, **given)
    left = [check.name for check in checks]

    def on_done(name: str) -> None:
        left.remove(name)
        waiting.say(f"checking {', '.join(left)}")

    with waiting:
        return found + await examine(checks, on_done=on_done)


async def _tried(config: Config, waiting: _Waiting) -> list[Finding]:
    from agentrl.cli.doctor.deep import one_step_train
    from agentrl.supervision.secrets import Secrets

    with waiting:
        return await one_step_train(config, secrets=Secrets.from_environment(os.environ), say=waiting.say)


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """A table in a terminal; elsewhere one line for each finding."""
    from rich.table import Table
    from rich.text import Text

    if not console.is_terminal:
        for one in findings:
            console.print(Text(f"{one.status:<5}{one.name}: {one.found}" + (f" -> {one.fix}" if one.fix else "")))
        return
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, min_width=NAME_WIDTH)
    table.add_column(overflow="fold")
    for one in findings:
        said = Text(one.found)
        if one.fix:
            said.append(f"\n→ {one.fix}", style=STYLES[one.status])
        table.add_row(Text(one.status, style=STYLES[one.status]), Text(one.name), said)
    console.print(table, soft_wrap=False)


def _print_totals(console: Console, findings: Sequence[Finding], left_out: Sequence[str]) -> None:
    from rich.text import Text

    from agentrl.cli.doctor.findings import FindingStatus

    counts = Counter(one.status for one in findings)
    console.print(Text("\n" + ", ".join(f"{counts[status]} {status}" for status in FindingStatus)))
    for text in left_out:
        console.print(Text(f"Not checked: {text}"))
