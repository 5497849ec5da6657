"""CPU, memory and lateness of processes that play. Standard library only, to run in every arm's environment."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

NOTES = "AGENTRL_BENCHMARK_NOTES"
"""Names a folder in which a process that plays writes how late its event loop was."""
TICKS = os.sysconf("SC_CLK_TCK")


class Meter:
    """`async with Meter() as meter:` around the episodes, then `meter.report(...)`."""

    async def __aenter__(self) -> Meter:
        self._base_bytes = _resident_bytes()
        self._peak_bytes = self._base_bytes
        self._late_s: list[float] = []
        self._cpu_s, self._wall_s = time.process_time(), time.monotonic()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cpu_s, self._wall_s = time.process_time() - self._cpu_s, time.monotonic() - self._wall_s
        self._task.cancel()

    async def _watch(self) -> None:
        """Samples memory and the lateness of the event loop, ten times per second."""
        while True:
            started = time.monotonic()
            await asyncio.sleep(0.1)
            self._late_s.append(time.monotonic() - started - 0.1)
            self._peak_bytes = max(self._peak_bytes, _resident_bytes())

    def report(self, *, num_episodes: int, num_turns: int, mean_reward: float) -> dict[str, float]:
        """The measurements of a run whose episodes were all live at once."""
        late = sorted(self._late_s) or [0.0]
        return {
            "episodes": num_episodes,
            "turns": num_turns,
            "reward": mean_reward,
            "wall_s": self._wall_s,
            "cpu_s": self._cpu_s,
            "cpu_ms_a_turn": 1000 * self._cpu_s / num_turns,
            "kb_an_episode": (self._peak_bytes - self._base_bytes) / num_episodes / 1000,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
            "late_p50_ms": 1000 * late[len(late) // 2],
            "late_p99_ms": 1000 * late[int(len(late) * 0.99)],
        }


_noting: set[asyncio.Task[None]] = set()


def begin_notes() -> None:
    """From the first call in a process on, it notes how late its event loop is."""
    if not _noting and NOTES in os.environ:
        _noting.add(asyncio.get_running_loop().create_task(_note_lateness(Path(os.environ[NOTES]))))


def noted_late_s(folder: Path) -> float:
    """The lateness (p99) of the latest event loop among those that were noted, 0 without any."""
    return max((json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")), default=0.0)


async def _note_lateness(folder: Path) -> None:
    late_s: list[float] = []
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.1)
        late_s.append(time.monotonic() - began - 0.1)
        begun = folder / f"{os.getpid()}.part"  # renamed, so that nobody reads half of it
        begun.write_text(json.dumps(_percentile(late_s, 0.99)))
        begun.replace(begun.with_suffix(".json"))


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)] if values else 0.0


def process_facts(pid: int) -> dict[str, float]:
    """Processor seconds since its start, resident memory and its peak, of another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "cpu_s": (int(fields[11]) + int(fields[12])) / TICKS,
        "rss_mb": int(status["VmRSS"].split()[0]) / 1000,
        "peak_mb": int(status["VmHWM"].split()[0]) / 1000,
    }


def children_of(pid: int) -> list[int]:
    """Process ids, the oldest first."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What a worker took between two looks at its process_facts."""
    return {
        "cpu_s": after["cpu_s"] - before["cpu_s"],
        "start_mb": before["rss_mb"],
        "peak_mb": after["peak_mb"],
    }


def playing_facts(
    rewards: Sequence[float], turns: int, meter: Meter, workers: Sequence[Mapping[str, float]], folder: Path
) -> dict[str, float]:
    """The measurements of one arm: `workers` are those that played (spent), none where this process did."""
    own = meter.report(num_episodes=len(rewards), num_turns=turns, mean_reward=sum(rewards) / len(rewards))
    playing_s = sum(worker["cpu_s"] for worker in workers) if workers else own["cpu_s"]
    return {
        "reward": own["reward"],
        "wall_s": own["wall_s"],
        "turns_a_second": turns / own["wall_s"],
        "player_ms_a_turn": 1000 * playing_s / turns,
        "orchestrator_ms_a_turn": own["cpu_ms_a_turn"] if workers else 0.0,
        "orchestrator_late_ms": own["late_p99_ms"],
        "player_late_ms": 1000 * noted_late_s(folder),
        "player_start_mb": max((worker["start_mb"] for worker in workers), default=0.0),
        "player_peak_mb": max((worker["peak_mb"] for worker in workers), default=own["peak_mb"]),
        "orchestrator_peak_mb": own["peak_mb"],
    }


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
