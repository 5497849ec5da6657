"""`python -m trainer.plan`, which `agentrl doctor CONFIG --plan` executes: configs as JSON in, their needs as JSON out.

Reads a JSON list of configs that share one model. Each distinct pass is counted once.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from agentrl.cli.doctor.plan.records import LearnerNeeds
from agentrl.config import Config
from agentrl.errors import AgentRLError, ConfigError


def main() -> int:
    """Returns the exit code: 0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m trainer.plan", description="Memory of a learner, without a GPU.")
    parser.add_argument("--model-config", type=Path, help="config.json of the model; default: that of model.path")
    arguments = parser.parse_args()
    try:
        configs = [Config.model_validate(one) for one in msgspec.json.decode(sys.stdin.buffer.read())]
        sys.stdout.buffer.write(msgspec.json.encode(answers(configs, arguments.model_config)) + b"\n")
    except AgentRLError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def answers(configs: list[Config], model_config: Path | None) -> list[LearnerNeeds]:
    """What one rank of each config needs. Raises ConfigError for a model that no config could train."""
    from trainer.plan import dry_pass
    from trainer.plan.needs import needs

    settings = dry_pass.settings_of(configs[0], model_config)
    models: dict[str, Any] = {}

    def model_of(config: Config) -> Any:
        learner = config.learner
        kept = (learner.gradient_checkpointing, learner.offload_activations, learner.mlp_tiles)
        key = f"{kept} {config.model}"
        if key not in models:
            models[key] = dry_pass.planned_model(config, settings)
        return models[key]

    measured = cache(dry_pass.measure)
    found = []
    for config in configs:
        try:
            reference = dry_pass.planned_reference(config, settings)
            found.append(needs(config, model_of(config), measured, reference=reference))
        except ConfigError as error:
            raise ConfigError(f"the learner refuses this model: {error}") from error
    return found


if __name__ == "__main__":
    sys.exit(main())
