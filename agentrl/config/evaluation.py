"""Evaluation: how often, with how many samples, and on which held-out sets. Independent of how a set is played."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from agentrl.config.environment import EnvConfig, WrapperConfig
from agentrl.config.section import Section

TopP = Annotated[float, Field(gt=0, le=1)]
SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
OF_ENV = ("kwargs", "wrappers", "max_turns")
SAMPLING = ("num_tasks", "samples_per_task", "temperature", "top_p")


class EvalSetConfig(Section):
    """One of several held-out sets. What is null is as for the run.

    Example:
        >>> EvalSetConfig(data="AIME-2025", num_tasks=30).samples_per_task is None
        True
    """

    data: str | None = None
    """Held-out rows, given as in env.eval_data. null: env.eval_data; with a `target`, the rows that it makes itself."""
    target: str | None = None
    """Another environment, given as in env.target. null: the run's."""
    kwargs: dict[str, Any] | None = None
    """Its arguments. null: env.kwargs; with a `target`, none."""
    wrappers: tuple[WrapperConfig, ...] | None = None
    """Wrappers around it. null: env.wrappers; with a `target`, none."""
    max_turns: PositiveInt | None = None
    """Turns of an episode. null: env.max_turns; with a `target`, the environment's own number."""
    num_tasks: PositiveInt | None = None
    """How many of its tasks are evaluated, from the first. null: eval.num_tasks."""
    samples_per_task: PositiveInt | None = None
    """The n of avg@n. null: eval.samples_per_task."""
    temperature: PositiveFloat | None = None
    """Sampling temperature. null: eval.temperature."""
    top_p: TopP | None = None
    """Nucleus sampling. null: eval.top_p."""

    def env(self, run: EnvConfig) -> EnvConfig:
        """The environment and the held-out rows of this set, in a run with the environment `run`."""
        own = {name: value for name in OF_ENV if (value := getattr(self, name)) is not None}
        if self.target is not None:
            own |= {"target": self.target, "train_data": run.train_data, "allow_overlap": run.allow_overlap}
            return EnvConfig(eval_data=self.data, **own)
        return run.model_copy(update=own | ({"eval_data": self.data} if self.data is not None else {}))

    @property
    def has_own_rows(self) -> bool:
        """Whether env.eval_data is not played."""
        return self.data is not None or self.target is not None


class EvalConfig(Section):
    """Evaluation on held-out tasks, with the code that plays training episodes: docs/evaluation.md.

    Example:
        >>> EvalConfig(every=20, samples_per_task=16).num_tasks
        64
    """

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations during training. 0: only before and after."""
    engines: Annotated[int, Field(ge=0)] = 0
    """Engines started only for evaluations, as engine.replicas are: training goes on while they play with the version
    that is measured. An evaluation that is due while another one runs is skipped, with a warning. The last version is
    measured by the run's own engines. Needs weights in folders: engine.weight_transfer=safetensors, which auto then is,
    or reload. 0: training waits for each evaluation."""
    num_tasks: PositiveInt = 64
    """How many tasks of the test split are evaluated, from its first."""
    samples_per_task: PositiveInt = 4
    """The n of avg@n."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of evaluations."""
    top_p: TopP = 1.0
    """Nucleus sampling of evaluations: 1 samples from all tokens."""
    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """Several held-out sets, each with a name and numbers of its own: `{aime25: {data: AIME-2025}, gsm8k: {data: GSM8K,
    num_tasks: 200}}`. The first is the one that a run is judged by. {}: one set without a name, of env.eval_data."""

    @field_validator("sets", mode="before")
    @classmethod
    def _are_named(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"give each set a name, as in {{aime25: {{data: AIME-2025}}}}; got {_short(value)}")
        for name in value:
            if not isinstance(name, str):
                raise ValueError(f'the name {name!r} is not a text: write "{name}" in quotes')
            if not SET_NAME.fullmatch(name):
                raise ValueError(f"the name {name!r} must be letters, digits, - and _, at most 40: it names files")
        return value

    def is_due(self, step: int) -> bool:
        """Whether the version that this step makes is measured during training."""
        return bool(self.every) and step % self.every == 0

    def resolved(self, run: EnvConfig) -> dict[str, tuple[EnvConfig, EvalConfig]]:
        """Name -> the environment and the settings of each set; without `sets`, of the only one, named ""."""
        if not self.sets:
            return {"": (run, self)}
        return {name: (one.env(run), self._of(one)) for name, one in self.sets.items()}

    def check_data(self, run: EnvConfig) -> None:
        """Raises ValueError where the run names held-out rows that no set plays."""
        if self.sets and run.eval_data is not None and all(one.has_own_rows for one in self.sets.values()):
            raise ValueError(
                f"env.eval_data={run.eval_data} is in none of eval.sets ({', '.join(self.sets)}): make it a set, "
                f"eval.sets.NAME.data={run.eval_data}, or leave it out"
            )

    def _of(self, one: EvalSetConfig) -> EvalConfig:
        own = {name: value for name in SAMPLING if (value := getattr(one, name)) is not None}
        return self.model_copy(update=own | {"sets": {}})


def _short(value: Any) -> str:
    return "no value" if value is None else repr(value)[:60]
