"""Concurrent episodes of one worker process: CPU per turn, memory per live episode, lateness of the event loop.

`python -m benchmarks.rollout [--verifiers-python PATH]` writes benchmarks/rollout.md. Each arm plays the same scripted
dialogue, with drawn latencies, in a process of its own: the token path with the engine in the process; agentrl over an
OpenAI endpoint in another process; the `verifiers` package over the same endpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.chat.chat_model import ChatModel
from agentrl.chat.runners import EndpointRunners, TokenRunners
from agentrl.config import RolloutConfig
from agentrl.env import Episode, ToolEnv
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import RolloutSettings
from agentrl.testing import call
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.tools import tool
from agentrl.types import Completion, FinishReason, Message, Sampling, Task, TrajectoryGroup, VersionSpan, system, user
from benchmarks import reporting
from benchmarks.rollout_meter import Meter
from benchmarks.rollout_script import (
    ANSWER,
    GOLD,
    NUM_CALLS,
    NUM_TURNS,
    QUESTION,
    SYSTEM,
    THOUGHT,
    Latency,
    entry,
    key_of,
)

REPORT = Path(__file__).with_suffix(".md")
GROUP_SIZE = 8
VOCABULARY_TEXTS = (SYSTEM, THOUGHT, ANSWER, QUESTION, entry("flour"))
SETTINGS = RolloutSettings(
    config=RolloutConfig(
        max_context=8192, max_turn_tokens=512, tool_output_tokens=256, episode_timeout_s=3600.0, group_size=GROUP_SIZE
    )
)
GOAL_MS = 1.0


class Books(ToolEnv):
    """Looks up entries; each lookup takes `tool_s` seconds."""

    max_turns = 8
    tool_s = 0.05

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The instructions and the question."""
        return [system(SYSTEM), user(task.prompt)], {}

    @tool
    async def lookup(self, key: str) -> str:
        """Look up one entry of the books."""
        await asyncio.sleep(self.tool_s)
        return entry(key)

    async def score(self, episode: Episode) -> dict[str, float]:
        """Whether the total is boxed."""
        return {"correct": float(f"\\boxed{{{GOLD}}}" in episode.final_text)}


class TimedEngine:
    """Plays the dialogue with its latencies. Every answer consists of new objects, as if it had been received."""

    def __init__(self, tokenizer: TurnTokenizer, latency: Latency) -> None:
        said = [Message(role="assistant", content=THOUGHT, tool_calls=call("lookup", key=key_of(turn)).tool_calls)
                for turn in range(NUM_CALLS)]  # fmt: skip
        self._turns = [array("q", tokenizer.turn(m)) for m in (*said, Message(role="assistant", content=ANSWER))]
        self._logprobs = [array("d", [-0.5] * len(turn)) for turn in self._turns]
        self._latency = latency
        self._rng = random.Random(0)
        self._num_turns: dict[str | None, int] = {}
        self.num_tokens = 0

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        """The next turn of the episode."""
        await asyncio.sleep(self._latency.draw(self._rng))
        turn = self._num_turns[session_id] = self._num_turns.get(session_id, -1) + 1
        ids = self._turns[turn].tolist()
        self.num_tokens += len(ids)
        return Completion(
            token_ids=tuple(ids),
            behavior_logprobs=tuple(self._logprobs[turn].tolist()),
            version_spans=(VersionSpan(version=0, start=0, end=len(ids)),),
            finish_reason=FinishReason.STOP,
        )


def tasks(num_groups: int) -> list[Task]:
    """One episode per group."""
    return [Task(id=f"t{i}", prompt=QUESTION.format(index=i), answer=GOLD) for i in range(num_groups)]


async def token_arm(num_episodes: int, median_s: float) -> dict[str, float]:
    """The path of training: token ids, masks, logprobs, versions."""
    tokenizer = small_tokenizer()
    engine = TimedEngine(tokenizer, Latency(median_s=median_s))
    player = GroupPlayer(Books, {"train": SETTINGS}, TokenRunners(tokenizer))
    async with Meter() as meter:
        groups = await asyncio.gather(
            *(
                player.play_group(engine, i, task, kind="train")
                for i, task in enumerate(tasks(num_episodes // GROUP_SIZE))
            )
        )
    lengths = [len(t.token_ids()) for group in groups[:4] for t in group.trajectories]
    return summary(meter, groups) | {"tokens_an_episode": sum(lengths) / len(lengths)}


async def chat_arm(num_episodes: int, url: str) -> dict[str, float]:
    """The path of an evaluation over an OpenAI endpoint."""
    model = ChatModel(url, model="scripted", api_key=None, api_key_name="KEY", request_timeout_s=3600.0)
    player = GroupPlayer(Books, {"eval": SETTINGS}, EndpointRunners())
    async with model, Meter() as meter:
        groups = await asyncio.gather(
            *(
                player.play_group(model, i, task, kind="eval")
                for i, task in enumerate(tasks(num_episodes // GROUP_SIZE))
            )
        )
    return summary(meter, groups)


def summary(meter: Meter, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """The measurements of an arm. Raises SystemExit if an episode was not played to its end."""
    rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
    return meter.report(
        num_episodes=len(rewards), num_turns=len(rewards) * NUM_TURNS, mean_reward=sum(rewards) / len(rewards)
    )


def small_tokenizer() -> TurnTokenizer:
    """A tokenizer with a vocabulary learned from the dialogue: about four characters per token, like real ones."""
    from trainer.warmstart.tiny_model import make_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(list(VOCABULARY_TEXTS) * 4, 640).save_pretrained(folder)
        return TurnTokenizer.load(folder)


def run_arm(command: Sequence[str]) -> dict[str, float]:
    """An arm in a process of its own; its last line of output is its result."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=reporting.ROOT, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    if found["reward"] != 1.0:
        raise SystemExit(f"{' '.join(command[:4])}: mean reward {found['reward']}, every episode should end with 1")
    return found


class Endpoint:
    """Runs the scripted engine's process for the duration of a with block; yields its URL."""

    def __init__(self, median_s: float) -> None:
        self._command = [sys.executable, "-m", "benchmarks.rollout_server", str(median_s)]

    def __enter__(self) -> str:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True, cwd=reporting.ROOT)
        assert self._process.stdout is not None
        return f"http://127.0.0.1:{int(self._process.stdout.readline())}/v1"

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def measure(arguments: argparse.Namespace) -> list[tuple[str, dict[str, float]]]:
    """All arms, one after the other."""
    own = [sys.executable, "-m", "benchmarks.rollout", "--arm"]
    rows = []
    for num_episodes in arguments.episodes:
        found = run_arm([*own, "tokens", "--episodes", str(num_episodes), "--median-s", str(arguments.median_s)])
        rows.append(("agentrl, token path", found))
    with Endpoint(arguments.median_s) as url:
        count = str(arguments.http_episodes)
        rows.append(("agentrl, OpenAI endpoint", run_arm([*own, "chat", "--episodes", count, "--url", url])))
        if arguments.verifiers_python:
            script = str(Path(__file__).with_name("rollout_verifiers.py"))
            command = [arguments.verifiers_python, script, url, count, str(Books.tool_s)]
            rows.append(("verifiers, OpenAI endpoint", run_arm(command)))
    return rows


def report(rows: Sequence[tuple[str, dict[str, float]]], head: str, verifiers: str) -> str:
    """The committed page."""
    columns = (
        "arm",
        "episodes at once",
        "turns",
        "CPU ms a turn",
        "kB a live episode",
        "wall s",
        "loop late p50 / p99 ms",
    )
    cells = [
        (
            name,
            f"{found['episodes']:,.0f}",
            f"{found['turns']:,.0f}",
            f"{found['cpu_ms_a_turn']:.2f}",
            f"{found['kb_an_episode']:.0f}",
            f"{found['wall_s']:.0f}",
            f"{found['late_p50_ms']:.1f} / {found['late_p99_ms']:.0f}",
        )
        for name, found in rows
    ]
    most = max((found for name, found in rows if "token" in name), key=lambda found: found["episodes"])
    is_met = "met" if most["cpu_ms_a_turn"] < GOAL_MS else "missed"
    return (
        head
        + "\n"
        + reporting.table(columns, cells)
        + f"\nGoal: under {GOAL_MS:g} ms of CPU a turn at the most episodes: {most['cpu_ms_a_turn']:.2f} ms, {is_met}. "
        f"An episode of the token path ends with {rows[0][1]['tokens_an_episode']:.0f} tokens.\n\n"
        "- Every episode is live from the start; all end with the right answer, or the run fails.\n"
        "- CPU is that of the whole playing process, from the first reset to the last score, over all turns: "
        "rendering, parsing, tools, records. In the token path the engine's answers are made in the process (new token "
        "and logprob objects each, and their checks) and the wire is not in it: docs/engine.md has the client's cost. "
        "The endpoint's arms pay for HTTP and JSON on the client's side, and record no tokens.\n"
        "- Memory is the growth of resident memory at its peak over the episodes; at the end it holds whole records.\n"
        "- Lateness: a timer of 100 ms, how late it fires.\n"
        f"- verifiers: {verifiers}\n"
    )


def main() -> None:
    """Measure and write the report, or play one arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--http-episodes", type=int, default=1000)
    parser.add_argument("--median-s", type=float, default=10.0, help="median latency of a generation")
    parser.add_argument("--verifiers-python", help="interpreter of an environment that has verifiers 0.3")
    parser.add_argument("--out", type=Path, default=REPORT)
    parser.add_argument("--arm", choices=["tokens", "chat"])
    parser.add_argument("--url")
    arguments = parser.parse_args()
    if arguments.arm == "tokens":
        print(json.dumps(asyncio.run(token_arm(arguments.episodes[0], arguments.median_s))))
        return
    if arguments.arm == "chat":
        print(json.dumps(asyncio.run(chat_arm(arguments.episodes[0], arguments.url))))
        return
    settings = {
        "dialogue": f"{NUM_TURNS} turns, {NUM_CALLS} calls of a tool that takes {Books.tool_s * 1000:.0f} ms",
        "latency of a generation": f"log-normal, median {arguments.median_s:g} s, sigma {Latency(median_s=1.0).sigma}",
    }
    head = reporting.header("One rollout worker under load", settings)
    text = report(measure(arguments), head, verifiers_version(arguments.verifiers_python))
    arguments.out.write_text(text)
    print(text)


def verifiers_version(python: str | None) -> str:
    """The alternative that is compared."""
    if python is None:
        return "not measured: pass --verifiers-python"
    code = "import importlib.metadata as m; print(m.version('verifiers'))"
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return (
        f"{version}, its ToolEnv and Rubric (verifiers.legacy), environment.generate() with its own client and limits"
    )


if __name__ == "__main__":
    main()
