"""The arms of the `verifiers` package, on the scripted endpoint. Runs in an environment that has it.

    PYTHON benchmarks/rollout_verifiers.py URL NUM_EPISODES TOOL_LATENCY_S      -> one line of JSON
    PYTHON benchmarks/rollout_verifiers.py URL NUM_EPISODES --workers N         -> one line of JSON

The first plays in this process (benchmarks.rollout), the second by the env server with N workers and a tool that burns
processor time (benchmarks.rollout_workers). Of 0.3.1 it is the env server of `verifiers.legacy`: its ToolEnv calls
tools in the worker's event loop, as agentrl does. The env server of v1 starts a program for each episode, whose start
would be what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.rollout_meter import NOTES, Meter, begin_notes, children_of, playing_facts, process_facts, spent
from benchmarks.rollout_script import GOLD, NUM_TURNS, QUESTION, SYSTEM, busy_entry, entry

GROUP_SIZE = 8
LONG_S = 3600.0
SAMPLING = {"max_tokens": 512}


def environment(num_questions: int, lookup: Callable[[str], Awaitable[str]]) -> Any:
    """A ToolEnv that plays the dialogue with this tool."""
    import verifiers.legacy as vf
    from datasets import Dataset

    class Noting(vf.ToolEnv):
        async def setup_state(self, state: Any) -> Any:
            begin_notes()
            return await super().setup_state(state)

    def correct(completion: list[object], answer: str) -> float:
        last = completion[-1]
        text = last.get("content") if isinstance(last, dict) else getattr(last, "content", "")
        return float(f"\\boxed{{{answer}}}" in str(text))

    rows = [{"question": QUESTION.format(index=index), "answer": GOLD} for index in range(num_questions)]
    return Noting(
        eval_dataset=Dataset.from_list(rows),
        system_prompt=SYSTEM,
        tools=[lookup],
        max_turns=8,
        rubric=vf.Rubric(funcs=[correct], weights=[1.0]),
    )


def load_environment(num_questions: int = 1) -> Any:
    """What each worker of the env server loads, by the name of this module."""

    async def lookup(key: str) -> str:
        """Look up one entry of the books.

        Args:
            key: name of the item
        """
        return busy_entry(key)

    return environment(num_questions, lookup)


def client_config(url: str) -> Any:
    """Without a time-out that a late event loop could meet."""
    import verifiers.legacy as vf

    os.environ["SCRIPTED_KEY"] = "none"
    return vf.ClientConfig(api_key_var="SCRIPTED_KEY", api_base_url=url, timeout=LONG_S, connect_timeout=LONG_S)


async def play(url: str, num_episodes: int, tool_s: float) -> dict[str, float]:
    """All episodes at once, in this process."""

    async def lookup(key: str) -> str:
        """Look up one entry of the books.

        Args:
            key: name of the item
        """
        await asyncio.sleep(tool_s)
        return entry(key)

    env = environment(num_episodes, lookup)
    inputs = env.get_eval_dataset(n=num_episodes)
    async with Meter() as meter:
        found = await env.generate(
            inputs, client=client_config(url), model="scripted", sampling_args=SAMPLING, on_progress=lambda *_: None
        )
    rewards = [output["reward"] for output in found["outputs"]]
    return meter.report(
        num_episodes=num_episodes, num_turns=num_episodes * NUM_TURNS, mean_reward=sum(rewards) / len(rewards)
    )


async def serve(url: str, num_episodes: int, num_workers: int) -> dict[str, float]:
    """All groups at once, by the workers of an env server. This process is the orchestrator."""
    env, config = load_environment(num_episodes // GROUP_SIZE), client_config(url)
    env.env_id, env.env_args = Path(__file__).stem, {}
    tasks = env.get_eval_dataset(n=num_episodes // GROUP_SIZE).to_list()

    async def group(task: Any) -> list[float]:
        outputs = await env.run_group([dict(task) for _ in range(GROUP_SIZE)], config, "scripted", SAMPLING)
        return [output["reward"] for output in outputs]

    with tempfile.TemporaryDirectory() as name:
        os.environ[NOTES] = name
        await env.start_server(num_workers=num_workers, log_level="ERROR")
        try:
            await asyncio.gather(*(group(tasks[0]) for _ in range(num_workers)))  # each worker has loaded all it needs
            router = env.env_server_process.pid
            workers = workers_of(router)
            before = [process_facts(pid) for pid in (router, *workers)]
            guard = asyncio.create_task(_same_workers(router, workers))
            async with Meter() as meter:
                playing = asyncio.ensure_future(asyncio.gather(*map(group, tasks)))
                await asyncio.wait([playing, guard], return_when=asyncio.FIRST_COMPLETED)
            if guard.done():
                guard.result()
            guard.cancel()
            rewards = [reward for group_rewards in playing.result() for reward in group_rewards]
            took = [spent(*looks) for looks in zip(before, map(process_facts, (router, *workers)), strict=True)]
            facts = playing_facts(rewards, num_episodes * NUM_TURNS, meter, took[1:], Path(name))
        finally:
            await env.stop_server()
    facts["orchestrator_ms_a_turn"] += 1000 * took[0]["cpu_s"] / (num_episodes * NUM_TURNS)  # its router
    return facts


def workers_of(router: int) -> list[int]:
    """Process ids of the env server's workers."""
    return [pid for pid in children_of(router) if "EnvWorker" in Path(f"/proc/{pid}/cmdline").read_text()]


async def _same_workers(router: int, workers: Sequence[int]) -> None:
    """Raises SystemExit as soon as the env server has given up a worker: it plays the worker's episodes again."""
    while workers_of(router) == list(workers):
        await asyncio.sleep(1)
    raise SystemExit("the env server took a worker for dead and started another: more episodes than it carries")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("episodes", type=int)
    parser.add_argument("tool_s", type=float, nargs="?", default=0.0)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.workers:
        print(json.dumps(asyncio.run(serve(arguments.url, arguments.episodes, arguments.workers))))
    else:
        print(json.dumps(asyncio.run(play(arguments.url, arguments.episodes, arguments.tool_s))))
