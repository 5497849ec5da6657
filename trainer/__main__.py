"""`python -m trainer`: the learner process, under plain python, torchrun or the DeepSpeed launcher.

The only module of the learner that reads and sets environment variables, besides `ranks.join`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
from pathlib import Path
from typing import get_args

from agentrl import config as configs
from agentrl.config.engine import Transfer
from agentrl.errors import AgentRLError, ConfigError
from agentrl.supervision import secrets
from agentrl.supervision.parent import end_with_parent
from trainer.process_end import end_process


def main() -> int:
    """Returns the exit code: 0 when the run is over, 1 after an error (one line on stderr), 2 for wrong arguments."""
    arguments = _arguments()
    end_with_parent()  # torchrun, which starts ranks in sessions of their own, or the run's guard
    signal.signal(signal.SIGTERM, _leave)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        _run(arguments)
    except AgentRLError as error:
        sys.stderr.write(f"learner: {type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def _run(arguments: argparse.Namespace) -> None:
    given = {f"{secrets.RUN}_FILE": arguments.token_file} if arguments.token_file else {}
    token = secrets.read(secrets.RUN, {**os.environ, **given})
    if not token:
        raise ConfigError(f"set {secrets.RUN} to the orchestrator's token")
    config = configs.load(arguments.config)
    os.environ.setdefault("OMP_NUM_THREADS", str(config.learner.num_threads or 1))  # before anything loads OpenMP
    gc.disable()  # imports make no garbage: 1.9 s instead of 2.7 s
    from trainer import ranks

    ranks.set_defaults(os.environ)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # After the defaults are set: DeepSpeed reads its accelerator when it is imported.
    from trainer import gpu_memory, loop

    gc.enable()
    if arguments.weight_transfer == "ipc":
        gpu_memory.check_allocator(os.environ)
    loop.run(
        config,
        orchestrator_url=arguments.orchestrator,
        token=token,
        weights_dir=arguments.weights_dir,
        run_dir=arguments.run_dir,
        weight_transfer=arguments.weight_transfer,
        shares_gpu=arguments.shares_gpu,
        resume=arguments.resume,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer", description="The learner of one run.")
    parser.add_argument("--config", type=Path, required=True, help="resolved JSON of the run")
    parser.add_argument("--orchestrator", required=True, help="its base URL")
    parser.add_argument("--token-file", help=f"file with the token, if {secrets.RUN} is not set")
    parser.add_argument("--weights-dir", type=Path, required=True, help="where weights for the engines are written")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run's folder, for checkpoints")
    parser.add_argument(
        "--weight-transfer",
        choices=get_args(Transfer),
        default="safetensors",
        help="how weights reach the engines: engine.weight_transfer, resolved",
    )
    parser.add_argument("--shares-gpu", action="store_true", help="an engine uses the GPU of a rank")
    parser.add_argument("--resume", type=Path, help="checkpoint of the learner to continue from, or a folder of them")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # the DeepSpeed launcher passes it
    return parser.parse_args()


def _leave(signum: int, frame: object) -> None:
    """Turn SIGTERM into an ordinary exit, so that half-written folders are removed."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    end_process(main())
