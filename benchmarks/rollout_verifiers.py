"""The arm of the `verifiers` package: its ToolEnv on the scripted endpoint. Runs in an environment that has it.

PYTHON benchmarks/rollout_verifiers.py URL NUM_EPISODES TOOL_LATENCY_S    -> one line of JSON
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.rollout_meter import Meter
from benchmarks.rollout_script import GOLD, NUM_TURNS, QUESTION, SYSTEM, entry


async def play(url: str, num_episodes: int, tool_s: float) -> dict[str, float]:
    """All episodes at once."""
    import verifiers.legacy as vf
    from datasets import Dataset

    async def lookup(key: str) -> str:
        """Look up one entry of the books.

        Args:
            key: name of the item
        """
        await asyncio.sleep(tool_s)
        return entry(key)

    def correct(completion: list[object], answer: str) -> float:
        last = completion[-1]
        text = last.get("content") if isinstance(last, dict) else getattr(last, "content", "")
        return float(f"\\boxed{{{answer}}}" in str(text))

    rows = [{"question": QUESTION.format(index=index), "answer": GOLD} for index in range(num_episodes)]
    env = vf.ToolEnv(
        eval_dataset=Dataset.from_list(rows),
        system_prompt=SYSTEM,
        tools=[lookup],
        max_turns=8,
        rubric=vf.Rubric(funcs=[correct], weights=[1.0]),
    )
    os.environ["SCRIPTED_KEY"] = "none"
    client = vf.ClientConfig(api_key_var="SCRIPTED_KEY", api_base_url=url)
    inputs = env.get_eval_dataset(n=num_episodes)
    async with Meter() as meter:
        found = await env.generate(
            inputs, client=client, model="scripted", sampling_args={"max_tokens": 512}, on_progress=lambda *_: None
        )
    rewards = [output["reward"] for output in found["outputs"]]
    return meter.report(
        num_episodes=num_episodes, num_turns=num_episodes * NUM_TURNS, mean_reward=sum(rewards) / len(rewards)
    )


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(asyncio.run(play(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))))
