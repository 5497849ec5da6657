"""The `ray` section: the cluster on which `place: ray` starts the parts of a run, and what cannot be started there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from agentrl.config.engine import EngineConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.section import Choices, Section

PlaceName = Annotated[
    Literal["local", "ray"],
    Choices({"local": "this machine", "ray": "the nodes of a Ray cluster: the section `ray`, and docs/cluster.md"}),
]
PartName = Literal["engine", "learner", "sandbox", "rollout_worker"]


class RayConfig(Section):
    """Ray Core, which places, watches and ends the parts of a run. Read only with `place: ray`.

    Example:
        >>> RayConfig(bundles={"engine": {"GPU": 2, "CPU": 4}}).bundles["engine"]["GPU"]
        2.0
    """

    address: str | None = None
    """HOST:PORT of the cluster's head. null: the cluster that runs on this machine, or else a new one on this machine
    alone, which ends with the run."""
    grant_timeout_s: PositiveFloat = 300.0
    """How long a part may wait for its resources. After it the run ends with a table of what is asked for and what is
    available."""
    ranks_per_node: PositiveInt | None = None
    """Learner ranks on each node, each with a GPU of its own where the cluster has GPUs. null: all on one node."""
    bundles: dict[PartName, dict[str, Annotated[float, Field(ge=0)]]] = Field(default_factory=dict)
    """Ray resources that one engine, the learner on one node, the sandbox or one rollout worker asks for, in place of
    the default: `{engine: {GPU: 2, CPU: 8}}`. Default: a CPU, the GPUs that the part uses, and for the sandbox the
    resource `sandbox` where a node has it."""
    allow_without_token: bool = False
    """Use a cluster that requires no token, on which everybody who reaches its ports can run code."""

    @model_validator(mode="after")
    def _asks_for_something(self) -> RayConfig:
        for part, bundle in self.bundles.items():
            if not any(bundle.values()):
                raise ValueError(f"bundles.{part} asks for nothing: name a resource, such as {{CPU: 1}}")
        return self


def ray_refusal(ray: RayConfig, engine: EngineConfig, learner: LearnerConfig) -> str | None:
    """Why `place: ray` cannot start the parts of a run, and how to fix it; None where it can.

    >>> ray_refusal(RayConfig(ranks_per_node=4), EngineConfig(), LearnerConfig(num_ranks=8))
    """
    if learner.hostfile is not None:
        return "learner.hostfile with place=ray: Ray knows its nodes. Set ray.ranks_per_node instead of the file"
    if engine.gpus is not None:
        return "engine.gpus with place=ray: Ray gives each engine its GPUs. Leave it out, or set ray.bundles.engine"
    if engine.weight_transfer == "ipc" or engine.sleep_while_training:
        name = "engine.sleep_while_training" if engine.sleep_while_training else "engine.weight_transfer=ipc"
        return f"{name} with place=ray: engine and learner share no GPU there. Leave it out, or set place=local"
    if learner.num_ranks % (ray.ranks_per_node or 1):
        return f"ray.ranks_per_node={ray.ranks_per_node} must divide learner.num_ranks={learner.num_ranks}"
    return None
