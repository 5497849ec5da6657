"""CPU, memory and lateness of the playing process. Standard library only, to run in every arm's environment."""

from __future__ import annotations

import asyncio
import os
import resource
import time


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


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
