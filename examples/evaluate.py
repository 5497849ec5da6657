"""Measure a model: `python examples/evaluate.py`, after `make train`."""

from __future__ import annotations

from typing import Any

import agentrl

MODEL = "runs/quickstart/checkpoints/final"  # or a name on the hub, or the URL of a server


def main(config: str = "configs/quickstart.yaml", **options: Any) -> float:
    """Print avg@n and pass@k with their 95 % intervals, and the tasks that were never solved."""
    wanted: dict[str, Any] = {"model": MODEL, "samples": 4, "limit": 32, **options}
    measured = agentrl.evaluate(config, **wanted)
    result = measured.result
    print(f"avg@{result.n} {result.avg:.3f} [{result.avg_low:.3f}, {result.avg_high:.3f}]")
    for k, estimate in result.pass_at.items():
        print(f"pass@{k} {estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]")
    unsolved = [group.task.id for group in measured.groups if not any(group.episode_rewards)]
    print("never solved:", *unsolved)
    return result.avg


if __name__ == "__main__":
    main()
