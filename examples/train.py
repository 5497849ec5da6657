"""Train from a script: `python examples/train.py`. A callback collects the rewards; Ctrl-C stops every part."""

from __future__ import annotations

from typing import Any

import agentrl


class Rewards(agentrl.Observer):
    """Prints what the run is doing, and keeps the mean reward of each step."""

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def phase_started(self, name: str) -> None:
        """Such as "starting the engine (vLLM)"."""
        print(name)

    def step(self, report: agentrl.StepReport) -> None:
        """`report.metrics` has everything that metrics.jsonl gets."""
        self.rewards.append(report.metrics["rollout/reward_mean"])
        print(f"step {report.step}: reward {self.rewards[-1]:.2f}")


def main(config: str = "configs/quickstart.yaml", **options: Any) -> agentrl.RunResult:
    """Train twenty steps, unless `overrides` say otherwise."""
    wanted: dict[str, Any] = {"overrides": {"train.steps": 20}, "observer": Rewards(), **options}
    result = agentrl.train(config, **wanted)
    print(f"held out: {result.before.avg:.3f} before, {result.after.avg:.3f} after {result.minutes:.1f} minutes")
    print(f"model: {result.checkpoint}, report: {result.report}")
    return result


if __name__ == "__main__":
    main()
