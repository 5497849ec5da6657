"""Episodes played in the orchestrator, by one and by two rollout workers; and how many groups one orchestrator takes.

    python -m benchmarks.rollout_workers      # writes benchmarks/rollout_workers.md

*Playing*: the dialogue of benchmarks/rollout_script.py with a tool that burns 5 ms of processor time, against a
scripted engine that speaks vLLM's API in a process of its own. All episodes are live at once. *Taking* is
benchmarks/rollout_taken.py. Predictions were written before the first run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.chat.runners import TokenRunners
from agentrl.config import Config, parse
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.env import load_env_class
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import settings_of
from agentrl.supervision.child import Child
from agentrl.supervision.secrets import Secrets
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.tools import tool
from agentrl.types import Message, Task, TrajectoryGroup
from agentrl.workers.launch import rollout_workers, workers_ready
from agentrl.workers.records import RunInfo
from benchmarks import reporting, rollout_taken
from benchmarks.rollout import GROUP_SIZE, VOCABULARY_TEXTS, Books, tasks
from benchmarks.rollout_meter import Meter
from benchmarks.rollout_script import NUM_TURNS, entry

REPORT = Path(__file__).with_suffix(".md")
SECRETS = Secrets(run="benchmark", sandbox="benchmark", engine=None)
TOOL_S = 0.005
LONG_S = 3600.0
NOTES = "AGENTRL_BENCHMARK_NOTES"
"""Names a folder in which a process that plays writes how late its event loop was."""
TICKS = os.sysconf("SC_CLK_TCK")
PREDICTIONS = """Predicted before the first run, from the 1.0 ms a turn of [rollout.md](rollout.md):

- one worker plays as fast as the orchestrator itself, within 10 %; two play 1.4 to 1.7 times as fast on two cores,
  since engine and orchestrator need the rest
- a turn costs the process that plays it 6 to 8 ms (4 ms of them the tool's) in every arm, within 10 %
- with workers the orchestrator's event loop is less than 50 ms late (p99); without, more than 1 s
- a worker needs 150 to 300 MB before its episodes
- one orchestrator core takes 100 to 300 groups a second of 8 episodes with 950 tokens, 10 to 30 MB/s
"""


class BusyBooks(Books):
    """Books whose lookup computes instead of waiting."""

    _is_noted = False

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """See Books. The first call in a process begins to note how late the event loop is."""
        if not BusyBooks._is_noted and NOTES in os.environ:
            BusyBooks._is_noted = True
            asyncio.get_running_loop().create_task(_note_lateness(Path(os.environ[NOTES], f"{os.getpid()}.json")))
        return await super().reset(task=task, seed=seed)

    @tool
    async def lookup(self, key: str) -> str:
        """Look up one entry of the books."""
        until = time.process_time() + TOOL_S
        while time.process_time() < until:
            pass
        return entry(key)


async def _note_lateness(path: Path) -> None:
    late_s: list[float] = []
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.1)
        late_s.append(time.monotonic() - began - 0.1)
        _write_whole(path, json.dumps(_percentile(late_s, 0.99)))


def _write_whole(path: Path, text: str) -> None:
    """So that nobody reads half of it."""
    begun = path.with_suffix(".part")
    begun.write_text(text)
    begun.replace(path)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)] if values else 0.0


def config_of(folder: Path, workers: int) -> Config:
    """The run whose groups are played."""
    return parse(
        {
            "name": "rollout-workers",
            "out_dir": str(folder),
            "env": {"target": "benchmarks.rollout_workers:BusyBooks"},
            "model": {"path": str(folder / "tokenizer")},
            "engine": {"request_timeout_s": LONG_S},  # one pass of a loop with 10,000 episodes takes a minute
            "rollout": {
                "group_size": GROUP_SIZE,
                "max_context": 8192,
                "max_turn_tokens": 512,
                "tool_output_tokens": 256,
                "episode_timeout_s": LONG_S,
                "workers": workers,
                "worker_episodes": 100_000,
            },
        },
        source="benchmark",
    )


async def played(config: Config, engine_url: str, num_groups: int, folder: Path) -> dict[str, float]:
    """All groups at once, in this process or by workers, and what that took."""
    async with VLLMEngine(engine_url, request_timeout_s=LONG_S) as engine:
        if not config.rollout.workers:
            tokenizer = TurnTokenizer.load(config.model.path)
            env_class = load_env_class(config.env.target, config.env.kwargs)
            player: GroupPlayer[Any] = GroupPlayer(env_class, settings_of(config), TokenRunners(tokenizer))
            groups, meter = await _gathered(player.play_group, engine, num_groups)
            return _facts(groups, meter, [], folder)
        info = RunInfo(
            config=config.model_dump(mode="json"), model_path=config.model.path, sandbox_url="http://127.0.0.1:9"
        )
        graph = WaitGraph()
        async with rollout_workers(config, engine, info, secrets=SECRETS, logs=folder, wait_graph=graph) as found:
            dispatcher, parts = found
            await workers_ready(dispatcher, parts, graph)
            while len(dispatcher.names) < config.rollout.workers:
                await asyncio.sleep(0.05)
            before = [_process_facts(part) for part in parts]
            groups, meter = await _gathered(dispatcher.play_group, engine, num_groups)
            after = [_process_facts(part) for part in parts]
            spent = [
                {"cpu_s": new["cpu_s"] - old["cpu_s"], "start_mb": old["rss_mb"], "peak_mb": new["peak_mb"]}
                for old, new in zip(before, after, strict=True)
            ]
            return _facts(groups, meter, spent, folder)


async def _gathered(play: Any, engine: VLLMEngine, num_groups: int) -> tuple[list[TrajectoryGroup], Meter]:
    async with Meter() as meter:
        groups = await asyncio.gather(
            *(play(engine, number, task, kind="train") for number, task in enumerate(tasks(num_groups)))
        )
    return groups, meter


def _facts(
    groups: Sequence[TrajectoryGroup], meter: Meter, workers: Sequence[Mapping[str, float]], folder: Path
) -> dict[str, float]:
    rewards = [one.reward for group in groups for one in group.trajectories]
    turns = len(rewards) * NUM_TURNS
    own = meter.report(num_episodes=len(rewards), num_turns=turns, mean_reward=statistics.fmean(rewards))
    late = [json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")]
    playing_s = sum(worker["cpu_s"] for worker in workers) if workers else own["cpu_s"]
    return {
        "reward": own["reward"],
        "wall_s": own["wall_s"],
        "turns_a_second": turns / own["wall_s"],
        "player_ms_a_turn": 1000 * playing_s / turns,
        "orchestrator_ms_a_turn": own["cpu_ms_a_turn"] if workers else 0.0,
        "orchestrator_late_ms": own["late_p99_ms"],
        "player_late_ms": 1000 * max(late, default=0.0),
        "player_start_mb": max((worker["start_mb"] for worker in workers), default=0.0),
        "player_peak_mb": max((worker["peak_mb"] for worker in workers), default=own["peak_mb"]),
        "orchestrator_peak_mb": own["peak_mb"],
    }


def _process_facts(part: Child) -> dict[str, float]:
    """Of the worker below the part's guard."""
    guard = part.process.pid
    pid = int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "cpu_s": (int(fields[11]) + int(fields[12])) / TICKS,
        "rss_mb": int(status["VmRSS"].split()[0]) / 1000,
        "peak_mb": int(status["VmHWM"].split()[0]) / 1000,
    }


@contextmanager
def engine_process(tokenizer: Path, median_s: float) -> Iterator[tuple[str, int]]:
    """The URL and process id of the scripted engine."""
    command = [sys.executable, "-m", "benchmarks.rollout_engine", str(tokenizer), str(median_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=reporting.ROOT) as one:
        assert one.stdin is not None and one.stdout is not None
        yield f"http://127.0.0.1:{int(one.stdout.readline())}", one.pid
        one.stdin.close()


def play(arguments: argparse.Namespace) -> None:
    """One arm, in this process and its workers; the last line of output is its result."""
    from trainer.warmstart.tiny_model import make_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tokenizer(list(VOCABULARY_TEXTS) * 4, 640).save_pretrained(folder / "tokenizer")
        os.environ[NOTES] = name
        with engine_process(folder / "tokenizer", arguments.median_s) as (url, pid):
            num_groups = arguments.episodes // GROUP_SIZE
            found = asyncio.run(played(config_of(folder, arguments.workers), url, num_groups, folder))
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found["engine_s"] = (int(fields[11]) + int(fields[12])) / TICKS
    print(json.dumps(found))


def measured(arguments: argparse.Namespace) -> dict[int, list[dict[str, float]]]:
    """The runs of each number of workers; arms take turns."""
    found: dict[int, list[dict[str, float]]] = {workers: [] for workers in (0, 1, 2)}
    for _ in range(arguments.repeats):
        for workers, runs in found.items():
            command = [sys.executable, "-m", "benchmarks.rollout_workers", "--workers", str(workers)]
            command += ["--episodes", str(arguments.episodes), "--median-s", str(arguments.median_s)]
            runs.append(_result(command))
            print(workers, runs[-1], flush=True)
    return found


def _result(command: Sequence[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, cwd=reporting.ROOT, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    if found["reward"] != 1.0:
        raise SystemExit(f"{' '.join(command[1:])}: mean reward {found['reward']}: every episode should end with 1")
    return found


ROWS = {
    "turns a second": ("turns_a_second", "{:.0f}"),
    "ratio to the orchestrator alone": ("ratio", "{:.2f}"),
    "CPU ms a turn, of who plays": ("player_ms_a_turn", "{:.1f}"),
    "CPU ms a turn, orchestrator beside workers": ("orchestrator_ms_a_turn", "{:.2f}"),
    "CPU ms a turn, scripted engine": ("engine_ms_a_turn", "{:.2f}"),
    "event loop late p99 ms, orchestrator": ("orchestrator_late_ms", "{:.0f}"),
    "event loop late p99 ms, of who plays": ("player_late_ms", "{:.0f}"),
    "MB of a worker before its episodes": ("player_start_mb", "{:.0f}"),
    "MB of who plays, peak": ("player_peak_mb", "{:.0f}"),
    "MB of the orchestrator, peak": ("orchestrator_peak_mb", "{:.0f}"),
}


def playing_table(found: Mapping[int, Sequence[Mapping[str, float]]], num_turns: int) -> str:
    """Median and spread of each arm. Ratios are of runs of the same round."""
    arms = {
        workers: [
            run
            | {
                "ratio": run["turns_a_second"] / alone["turns_a_second"],
                "engine_ms_a_turn": 1000 * run["engine_s"] / num_turns,
            }
            for run, alone in zip(runs, found[0], strict=True)
        ]
        for workers, runs in found.items()
    }
    names = ["", "in the orchestrator", "1 worker", "2 workers"]
    rows = [
        [title, *(_cell([run[key] for run in runs], form) for runs in arms.values())]
        for title, (key, form) in ROWS.items()
    ]
    return reporting.table(names, rows)


def _cell(values: Sequence[float], form: str) -> str:
    middle, least, most = (form.format(one) for one in (statistics.median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def main() -> None:
    """Measure and write the report, or play one arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--median-s", type=float, default=1.0, help="median latency of a generation")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement of the orchestrator alone")
    parser.add_argument("--out", type=Path, default=REPORT)
    parser.add_argument("--workers", type=int, help="play this arm alone")
    arguments = parser.parse_args()
    if arguments.workers is not None:
        play(arguments)
        return
    settings = {
        "episodes at once": arguments.episodes,
        "dialogue": f"{NUM_TURNS} turns, {NUM_TURNS - 1} calls of a tool that burns {TOOL_S * 1000:g} ms of CPU",
        "latency of a generation": f"log-normal, median {arguments.median_s:g} s",
        "rounds": arguments.repeats,
    }
    head = reporting.header("Rollout workers", settings)
    found = measured(arguments)
    playing = playing_table(found, arguments.episodes * NUM_TURNS)
    taking = rollout_taken.table(seconds=arguments.seconds)
    arguments.out.write_text("\n".join([head, PREDICTIONS, "## Playing\n", playing, "## Taking\n", taking]))
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
