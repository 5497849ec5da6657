"""Play episodes and read them: `python examples/rollout.py`, after `make train`."""

from __future__ import annotations

from typing import Any

import agentrl

MODEL = "runs/quickstart/checkpoints/final"


def main(config: str = "configs/quickstart.yaml", **options: Any) -> int:
    """Print the messages of two episodes of each of two tasks."""
    wanted: dict[str, Any] = {"model": MODEL, "samples": 2, "limit": 2, **options}
    groups = agentrl.rollout(config, **wanted)
    for group in groups:
        print(f"== {group.task.id}: {group.task.prompt}")
        for episode in group.episodes:
            for message in episode.segments[-1].messages:
                print(f"{message.role}: {message.content}", *message.tool_calls)
            print(f"-- reward {episode.reward:g}")
    return sum(len(group.episodes) for group in groups)


if __name__ == "__main__":
    main()
