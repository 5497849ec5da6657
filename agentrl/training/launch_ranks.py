"""The command that starts the learner's ranks: one process, torchrun on one machine, DeepSpeed's launcher on several.

Independent of what the ranks do. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.config import LearnerConfig
from agentrl.config.hostfile import Host, read_hostfile
from agentrl.errors import ConfigError, MissingDependencyError
from agentrl.supervision import secrets
from agentrl.supervision.child import Spot, module_command
from agentrl.supervision.serving import free_port

TOKEN_FILE = "learner.token"


def launcher(
    learner: LearnerConfig, *, token_file: Path | None, spot: Spot | None = None, machines: int = 1
) -> list[str]:
    """The command up to the learner's own arguments, with a free port of its own at every call.

    Args:
        spot: one of `machines` nodes on each of which torchrun is started, with a part of the ranks.
        token_file: holds the run's token, for ranks that ssh starts: they do not get this process's environment, and
            the variables that DeepSpeed's launcher could pass on would be visible in command lines.

    Raises ConfigError, MissingDependencyError.

    Example:
        launcher(LearnerConfig(num_ranks=2), token_file=None)  # [python, "-m", "torch.distributed.run", ...]
    """
    if learner.hostfile is not None:
        hosts = check_hosts(learner)
        if len(hosts) > 1 and token_file is None:
            raise ConfigError(
                f"{secrets.RUN}_FILE: ssh does not pass the token on: name a file that holds it on all machines"
            )
        start = [*_deepspeed(learner.hostfile, hosts), "trainer"]
        return start if token_file is None else [*start, "--token-file", str(token_file)]
    if learner.num_ranks == 1:
        return module_command("trainer")
    where = ["--standalone"]
    if spot is not None and machines > 1:
        host, _, port = spot.meeting.rpartition(":")
        where = [f"--nnodes={machines}", f"--node-rank={spot.machine}"]
        where += [f"--master-addr={host}", f"--master-port={port}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *where]
    return [*torchrun, f"--nproc-per-node={learner.num_ranks // machines}", "--module", "trainer"]


def check_hosts(learner: LearnerConfig) -> list[Host]:
    """The lines of `learner.hostfile`; none without one. Raises ConfigError, MissingDependencyError."""
    if learner.hostfile is None:
        return []
    hosts = read_hostfile(learner.hostfile)
    where = f"learner.hostfile: {learner.hostfile}"
    if (num_slots := sum(host.num_ranks for host in hosts)) != learner.num_ranks:
        raise ConfigError(f"{where} has {num_slots} slots and learner.num_ranks={learner.num_ranks}: make them equal")
    first = hosts[0].name
    if not _is_this_machine(first):
        raise ConfigError(
            f"{where} begins with {first}, which is not this machine: the first rank talks to the orchestrator over "
            "loopback. Put this machine first, or start the run there"
        )
    if len(hosts) == 1:
        return hosts
    if first == "localhost" or first.startswith("127."):
        raise ConfigError(
            f"{where} begins with {first}, which the other machines would resolve to themselves: give an address"
        )
    for program in ("pdsh", "ssh"):
        if shutil.which(program) is None:
            raise MissingDependencyError(
                f"{where} names {len(hosts)} machines; DeepSpeed's launcher reaches them with {program}, which is not "
                "installed here: apt-get install pdsh openssh-client"
            )
    return hosts


def _deepspeed(hostfile: str, hosts: list[Host]) -> list[str]:
    first = hosts[0].name
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", hostfile]
    # A single machine is this one: ssh is not checked. Of several, all must find the first under its name here.
    launcher += ["--no_ssh_check"] if len(hosts) == 1 else []
    return [*launcher, "--master_addr", first, "--master_port", str(free_port(first)), "--module"]


def _is_this_machine(name: str) -> bool:
    with suppress(OSError):
        return free_port(name) > 0
    return False


@contextmanager
def token_file(run_dir: Path, token: str) -> Iterator[Path]:
    """A file with the token that only its owner can read; removed at the end of the block."""
    path = (run_dir / TOKEN_FILE).resolve()
    path.unlink(missing_ok=True)  # left over from a run that was killed
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
        yield path
    finally:
        path.unlink(missing_ok=True)
