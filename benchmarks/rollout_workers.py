"""Episodes played in the orchestrator, by one and by two rollout workers; and how many groups one orchestrator takes.

    python -m benchmarks.rollout_workers      # writes benchmarks/rollout_workers.md

*Playing*: the dialogue of benchmarks/rollout_script.py with a tool that burns 5 ms of processor time, against a
scripted engine that speaks vLLM's API in a process of its own. All episodes are live at once. With --verifiers-python
the workers of `verifiers`' env server play the same (benchmarks/rollout_verifiers.py). *Taking* is
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.chat.runners import TokenRunners
from agentrl.config import Config, parse
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.env import load_env_class
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import settings_of
from agentrl.supervision.secrets import Secrets
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.tools import tool
from agentrl.types import Message, Task, TrajectoryGroup
from agentrl.workers.launch import rollout_workers, workers_ready
from agentrl.workers.records import RunInfo
from benchmarks import reporting, rollout_taken
from benchmarks.rollout import GROUP_SIZE, VOCABULARY_TEXTS, Books, tasks
from benchmarks.rollout_meter import NOTES, Meter, begin_notes, children_of, playing_facts, process_facts, spent
from benchmarks.rollout_script import BUSY_S, NUM_TURNS, busy_entry

REPORT = Path(__file__).with_suffix(".md")
SECRETS = Secrets(run="benchmark", sandbox="benchmark", engine=None)
LONG_S = 3600.0
PREDICTIONS = """Predicted before the first run, from the 1.0 ms a turn of [rollout.md](rollout.md):

- one worker plays as fast as the orchestrator itself, within 10 %; two play 1.4 to 1.7 times as fast on two cores,
  since engine and orchestrator need the rest
- a turn costs the process that plays it 6 to 8 ms (4 ms of them the tool's) in every arm, within 10 %
- with workers the orchestrator's event loop is less than 50 ms late (p99); without, more than 1 s
- a worker needs 150 to 300 MB before its episodes
- one orchestrator core takes 100 to 300 groups a second of 8 episodes with 950 tokens, 10 to 30 MB/s
"""

VERIFIERS = """## Beside the env server of verifiers

verifiers {version}, {episodes:,} episodes at once in every arm. Its server is that of `verifiers.legacy` with a
ToolEnv, which calls tools in the worker's event loop as agentrl does; the server of its v1 starts a program for each
episode.
Groups of 8, the same scripted engine process and tool; time-outs of requests are an hour in all arms.

- Its workers speak the engine's OpenAI endpoint in text, and record no tokens, logprobs or versions. agentrl's do.
- Its "orchestrator" is the client process with its router. Its workers have played a group before they are measured.
- A worker whose heartbeat is 30 s late is replaced, and its episodes start again: that ends the arm with an error.
"""


class BusyBooks(Books):
    """Books whose lookup computes instead of waiting."""

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """See Books. The first call in a process begins to note how late the event loop is."""
        begin_notes()
        return await super().reset(task=task, seed=seed)

    @tool
    async def lookup(self, key: str) -> str:
        """Look up one entry of the books."""
        return busy_entry(key)


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
            players = [children_of(part.process.pid)[0] for part in parts]  # each below its part's guard
            before = [process_facts(pid) for pid in players]
            groups, meter = await _gathered(dispatcher.play_group, engine, num_groups)
            took = [spent(*looks) for looks in zip(before, map(process_facts, players), strict=True)]
            return _facts(groups, meter, took, folder)


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
    return playing_facts(rewards, len(rewards) * NUM_TURNS, meter, workers, folder)


@contextmanager
def engine_process(tokenizer: Path, median_s: float) -> Iterator[tuple[str, int]]:
    """The URL and process id of the scripted engine."""
    command = [sys.executable, "-m", "benchmarks.rollout_engine", str(tokenizer), str(median_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=reporting.ROOT) as one:
        assert one.stdin is not None and one.stdout is not None
        yield f"http://127.0.0.1:{int(one.stdout.readline())}", one.pid
        one.stdin.close()


def play(arguments: argparse.Namespace) -> None:
    """One arm; the last line of output is its result."""
    from trainer.warmstart.tiny_model import make_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tokenizer(list(VOCABULARY_TEXTS) * 4, 640).save_pretrained(folder / "tokenizer")
        os.environ[NOTES] = name
        with engine_process(folder / "tokenizer", arguments.median_s) as (url, pid):
            if arguments.verifiers_python:
                script = str(Path(__file__).with_name("rollout_verifiers.py"))
                command = [arguments.verifiers_python, script, f"{url}/v1", str(arguments.episodes)]
                found = _result([*command, "--workers", str(arguments.workers)])
            else:
                num_groups = arguments.episodes // GROUP_SIZE
                found = asyncio.run(played(config_of(folder, arguments.workers), url, num_groups, folder))
            found["engine_s"] = process_facts(pid)["cpu_s"]
    print(json.dumps(found))


class Arm(NamedTuple):
    """Who plays: so many workers, 0 for the orchestrator; of verifiers' env server where its interpreter is given."""

    workers: int
    verifiers_python: str | None = None

    def __str__(self) -> str:
        if not self.workers:
            return "in the orchestrator"
        of = "verifiers, " if self.verifiers_python else ""
        return f"{of}{self.workers} worker{'s' * (self.workers > 1)}"


def measured(arms: Sequence[Arm], *, episodes: int, median_s: float, repeats: int) -> dict[Arm, list[dict[str, float]]]:
    """The runs of each arm, each in processes of its own; arms take turns."""
    found: dict[Arm, list[dict[str, float]]] = {arm: [] for arm in arms}
    for _ in range(repeats):
        for arm, runs in found.items():
            command = [sys.executable, "-m", "benchmarks.rollout_workers", "--workers", str(arm.workers)]
            command += ["--episodes", str(episodes), "--median-s", str(median_s)]
            if arm.verifiers_python:
                command += ["--verifiers-python", arm.verifiers_python]
            runs.append(_result(command))
            print(arm, episodes, runs[-1], flush=True)
    return found


def _result(command: Sequence[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, cwd=reporting.ROOT, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    if found["reward"] != 1.0:
        raise SystemExit(f"{' '.join(command[1:])}: mean reward {found['reward']}: every episode should end with 1")
    return found


OWN = (Arm(0), Arm(1), Arm(2))
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


def playing_table(found: Mapping[Arm, Sequence[Mapping[str, float]]], num_turns: int) -> str:
    """Median and spread of each arm. Ratios are to the first arm, of runs of the same round."""
    alone = next(iter(found.values()))
    arms = {
        arm: [
            run
            | {
                "ratio": run["turns_a_second"] / first["turns_a_second"],
                "engine_ms_a_turn": 1000 * run["engine_s"] / num_turns,
            }
            for run, first in zip(runs, alone, strict=True)
        ]
        for arm, runs in found.items()
    }
    rows = [
        [title, *(_cell([run[key] for run in runs], form) for runs in arms.values())]
        for title, (key, form) in ROWS.items()
    ]
    return reporting.table(["", *map(str, arms)], rows)


def _cell(values: Sequence[float], form: str) -> str:
    middle, least, most = (form.format(one) for one in (statistics.median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def beside_verifiers(arguments: argparse.Namespace) -> str:
    """The section of the env server of verifiers, empty without its interpreter."""
    python, episodes = arguments.verifiers_python, arguments.verifiers_episodes or arguments.episodes
    if python is None:
        return ""
    arms = [*OWN, Arm(1, python), Arm(2, python)]
    found = measured(arms, episodes=episodes, median_s=arguments.median_s, repeats=arguments.repeats)
    head = VERIFIERS.format(version=version(python), episodes=episodes)
    return f"{head}\n{playing_table(found, episodes * NUM_TURNS)}"


def version(python: str) -> str:
    """Of the verifiers package that this interpreter has."""
    code = "import importlib.metadata as m; print(m.version('verifiers'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Measure and write the report, or play one arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--median-s", type=float, default=1.0, help="median latency of a generation")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement of the orchestrator alone")
    parser.add_argument("--verifiers-python", help="interpreter of an environment that has verifiers 0.3.1")
    parser.add_argument("--verifiers-episodes", type=int, help="episodes at once in the comparison (--episodes)")
    parser.add_argument("--out", type=Path, default=REPORT)
    parser.add_argument("--workers", type=int, help="play this arm alone")
    arguments = parser.parse_args()
    if arguments.workers is not None:
        play(arguments)
        return
    settings = {
        "episodes at once": arguments.episodes,
        "dialogue": f"{NUM_TURNS} turns, {NUM_TURNS - 1} calls of a tool that burns {BUSY_S * 1000:g} ms of CPU",
        "latency of a generation": f"log-normal, median {arguments.median_s:g} s",
        "rounds": arguments.repeats,
    }
    head = reporting.header("Rollout workers", settings)
    found = measured(OWN, episodes=arguments.episodes, median_s=arguments.median_s, repeats=arguments.repeats)
    parts = [head, PREDICTIONS, "## Playing\n", playing_table(found, arguments.episodes * NUM_TURNS)]
    parts += filter(None, [beside_verifiers(arguments)])
    parts += ["## Taking\n", rollout_taken.table(seconds=arguments.seconds)]
    arguments.out.write_text("\n".join(parts))
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
