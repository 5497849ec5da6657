"""A Slurm cluster of two machines (tests/machines.py): munged, slurmctld and two slurmd from Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.machines import Machine, two_machines

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
SETTINGS = """\
ClusterName=test
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=10
NodeName={first.name} NodeAddr={first.address} CPUs={cpus} RealMemory=1000
NodeName={second.name} NodeAddr={second.address} CPUs={cpus} RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """What is missing here; None where a cluster can be made."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"needs {missing[0]}: apt-get install munge slurmctld slurmd slurm-client" if missing else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """A cluster that runs. Example: `slurm.run(["sbatch", "--wait", "job.sh"], cwd=folder)`."""

    machines: tuple[Machine, Machine]
    env: Mapping[str, str]
    folder: Path

    def run(self, command: Sequence[str], *, cwd: Path, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        """The command on the first machine."""
        process = self.machines[0].start(
            command, cwd=cwd, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        said, _ = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(list(command), process.returncode, said)


@contextmanager
def slurm_cluster(folder: Path, *, cpus: int, env: Mapping[str, str]) -> Iterator[Slurm]:
    """Two idle nodes with `cpus` each, until the end of the block; jobs get `env`."""
    with two_machines(folder / "machines") as (first, second):
        (folder / "munge").mkdir(mode=0o700)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(SETTINGS.format(first=first, second=second, folder=folder, cpus=cpus))
        env = {**env, "SLURM_CONF": str(folder / "slurm.conf")}
        slurm = Slurm(machines=(first, second), env=env, folder=folder)
        munge = folder / "munge"
        key = munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        _in_background(first, ["munged", "-F", "--force", *(f"--{k}={munge / v}" for k, v in files.items())], slurm)
        _until(lambda: (munge / "socket").exists(), "munged")
        _in_background(first, ["slurmctld", "-D"], slurm)
        for machine in (first, second):
            (folder / machine.name).mkdir()
            _in_background(machine, ["slurmd", "-D", "-N", machine.name], slurm)
        idle = ["sinfo", "--noheader", "--states=idle", "--Node", "--format=%n"]
        _until(lambda: slurm.run(idle, cwd=folder).stdout.split() == [first.name, second.name], "slurmd")
        yield slurm


def _in_background(machine: Machine, command: Sequence[str], slurm: Slurm) -> None:
    with (slurm.folder / f"{machine.name}-{command[0]}.out").open("w") as log:
        machine.start(command, cwd=slurm.folder, env=slurm.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def _until(holds: object, what: str, within_s: float = 200) -> None:
    assert callable(holds)
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not start"
        time.sleep(0.1)
