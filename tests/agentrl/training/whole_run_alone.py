"""A whole run as a process of its own, with the screens of the command line: for disks and pipes that break.

    python -m tests.agentrl.training.whole_run_alone FOLDER TOKENIZER [--tmpfs BYTES] [--steps N]

With `--tmpfs`, a file system of that size is mounted on FOLDER (in the caller's mount namespace: `unshare -rm`)
and filled up after the first step; once the run has ended, room is made and the run goes on to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

from agentrl.buffer.journal import Journal
from agentrl.cli.options import run as run_command
from agentrl.config import Config
from agentrl.report.console import TrainConsole
from agentrl.report.metrics import read
from agentrl.report.observer import StepReport
from agentrl.run_folder import RunFolder
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training.resume import reopen
from tests.agentrl.training import whole_run
from tests.agentrl.training.whole_run import YesAndNo, make_config, obedient_learner, orchestrating

BALLAST = "ballast"


class Filling(TrainConsole):
    """After the first step no byte is free in the folder."""

    folder: Path

    def step(self, report: StepReport) -> None:
        super().step(report)
        fill(self.folder)


def fill(folder: Path) -> None:
    """Until the kernel says that there is no space."""
    with (folder / BALLAST).open("ab", buffering=0) as file, suppress(OSError):
        for size in (65536, 4096, 512, 1):
            with suppress(OSError):
                while True:
                    file.write(b"\0" * size)


async def train(config: Config, tokenizer: TurnTokenizer, *, run: RunFolder | None = None, version: int = 0) -> None:
    """One run; the learner stands at `version`."""
    async with orchestrating(config, YesAndNo(tokenizer), tokenizer, run=run) as (orchestrator, url):
        learner = asyncio.create_task(obedient_learner(url, [], version=version))
        try:
            await orchestrator.run()
        finally:
            learner.cancel()
            await asyncio.wait({learner})


def main() -> int:
    """Exit code of the run, or of the one that went on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokenizer")
    parser.add_argument("--tmpfs", type=int)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    tokenizer = TurnTokenizer.load(options.tokenizer)
    config = make_config(options.folder, steps=options.steps, eval_every=0)
    if options.tmpfs is not None:
        size = f"size={options.tmpfs}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", options.folder], check=True)
        fill_and_go_on(config, tokenizer)
        return 0
    show(TrainConsole(total_steps=options.steps))
    run_command(train(config, tokenizer), debug=False)
    return 0


def show(console: TrainConsole) -> None:
    """Let the next run's steps be shown by it."""
    setattr(whole_run, "Quiet", lambda: console)  # noqa: B010


def fill_and_go_on(config: Config, tokenizer: TurnTokenizer) -> None:
    """A run whose disk is full after the first step, and the same run with room again; says what was trained."""
    disk, steps = Path(config.out_dir), config.train.steps
    Filling.folder = disk
    show(Filling(total_steps=steps))
    try:
        run_command(train(config, tokenizer), debug=False)
    except SystemExit as ended:
        sys.stdout.write(f"ended with {ended.code}\n")
    (disk / BALLAST).unlink()
    show(TrainConsole(total_steps=steps))
    folder, config = reopen(disk / config.name, [])
    with closing(Journal(folder.journal)) as journal:
        version = journal.last_step()
    run_command(train(config, tokenizer, run=folder, version=version), debug=False)
    recorded = [line.step for line in read(folder.metrics) if line.kind == "step"]
    with closing(Journal(folder.journal)) as journal:
        trained = Counter(step for (step,) in journal._rows("SELECT step FROM groups WHERE state = 'trained'"))
    sys.stdout.write(f"went on at {version}, steps {recorded}, groups {dict(trained)}\n")


if __name__ == "__main__":
    sys.exit(main())
