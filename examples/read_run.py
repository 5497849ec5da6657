"""Read what a run left in its folder: `python examples/read_run.py [RUN]`, while it trains or after."""

from __future__ import annotations

import sys
from collections import Counter

import agentrl


def main(path: str = "runs/quickstart") -> None:
    """Print the state of the run, its measurements, what became of its groups, and its longest episode."""
    run = agentrl.read_run(path)
    print(run.status().sentence)
    for result in run.evaluations():
        print(f"version {result.policy_version}: avg@{result.n} {result.avg:.3f}")
    steps = run.metrics()
    print("reward:", *(f"{reward:.2f}" for reward in steps.columns()["rollout/reward_mean"]))
    print("groups:", Counter(group["state"] for group in run.ledger()))
    longest = max(run.episodes(step=run.steps()[-1]), key=lambda episode: episode["num_tokens"])
    print("longest episode of the last step:", longest["task_id"], f"{longest['num_tokens']} tokens")
    print("tables:", run.ledger().to_arrow().schema.names)  # .to_pandas() where pandas is installed


if __name__ == "__main__":
    main(*sys.argv[1:2])
