"""The batch script that starts a run under Slurm: Ray on every node of the job, and `agentrl train` on the first."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.cli.cluster.resources import Asked, Nodes, described
from agentrl.config import Config

PORT = 6379

SCRIPT = """\
#!/bin/bash
# {command}
# Written by `agentrl cluster render slurm`. Nodes: {count}. The parts ask for
{parts}
#
# Start it in the folder of the config, which all nodes must see under the same name:
#   sbatch --time=24:00:00 --partition=NAME --account=NAME FILE
# Submit it again after a time limit or a failure: the run continues.
#SBATCH --job-name={name}
#SBATCH --output={name}-%j.log
#SBATCH --nodes={count}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
{gpu_line}#SBATCH --mem=0
#SBATCH --exclusive
set -euo pipefail
export PATH={programs}:"$PATH"

# Who has this token can run code on the job's nodes, through Ray. It is made for this job; only its owner reads it.
mkdir -p {out_dir}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={out_dir}/.ray-token-"$SLURM_JOB_ID"
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT
(umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' >"$RAY_AUTH_TOKEN_PATH")

# The address of the first node, which runs this script. Its own name may lead to loopback.
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(getent ahostsv4 "$first" | awk '$1 !~ /^127[.]/ && !found {{print $1; found = 1}}' || true)
address=${{address:-$(hostname -I | cut -d' ' -f1)}}

# The nodes may start 300 s apart. The others end 20 s after the first, whose end is the end of the run.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300 RAY_gcs_rpc_server_reconnect_timeout_s=20 RAY_USAGE_STATS_ENABLED=0
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
    ray symmetric-run --address "$address:{port}" --min-nodes "$SLURM_JOB_NUM_NODES" \\
    --num-cpus={cpus} --num-gpus={gpus} \\
    -- {command}
"""


def script(config: Config, command: Sequence[str], *, asked: Sequence[Asked], nodes: Nodes) -> str:
    """The script that runs `command` on `nodes`. It holds no secret."""
    parts = "\n".join(f"#   {line}" for line in described(asked).splitlines())
    return SCRIPT.format(
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", config.name),
        command=shlex.join(command).replace("\n", " "),
        parts=parts,
        count=nodes.count,
        cpus=nodes.cpus,
        gpus=nodes.gpus,
        gpu_line=f"#SBATCH --gpus-per-node={nodes.gpus}\n" if nodes.gpus else "",
        programs=shlex.quote(str(Path(sys.executable).parent)),
        out_dir=shlex.quote(str(Path(config.out_dir).absolute())),
        port=PORT,
    )
