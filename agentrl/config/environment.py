"""The environment of a run, and the rows of data that it plays. Independent of how environments are found and made."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt, model_validator

from agentrl.config.section import Section


class WrapperConfig(Section):
    """One wrapper around the environment: `TimeLimit: {turns: 4}`, or only a name where it needs no arguments.

    Example:
        >>> WrapperConfig.model_validate({"TimeLimit": {"turns": 4}}).kwargs
        {'turns': 4}
    """

    name: str
    """One of agentrl.wrappers, or your own: `module:Class`, `path/to/file.py:Class`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor."""

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and "name" not in value and len(value) == 1:
            name, kwargs = next(iter(value.items()))
            return {"name": name, "kwargs": kwargs or {}}
        if not isinstance(value, dict) or value.keys() - {"name", "kwargs"}:
            raise ValueError("a wrapper is a name, or a name with its arguments: `TimeLimit: {turns: 4}`")
        return value


class EnvConfig(Section):
    """The environment, and the rows of data that it plays.

    Example:
        >>> EnvConfig(target="AimePython-v0", train_data="DAPO-17k").max_turns is None
        True
    """

    target: str
    """`module:Class`, `path/to/file.py:Class`, an adapter's `gymnasium:FrozenLake-v1`, or a registered id."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class's constructor, or options of the adapter that `target` names."""
    train_data: str | None = None
    """Training rows: a set's name (GSM8K), a hub name (hf:owner/name?split=train), a .jsonl or .parquet file, a folder:
    docs/math.md. null for environments that generate their own."""
    eval_data: str | None = None
    """Held-out rows, given in the same ways."""
    allow_overlap: bool = False
    """Train even where training rows are in the held-out data too, word for word or nearly."""
    max_turns: PositiveInt | None = None
    """Turns of an episode. null: the environment's own number."""
    wrappers: tuple[WrapperConfig, ...] = ()
    """Wrappers around the environment, the innermost first: `[{ToolBudget: {calls: 4}}, {TimeLimit: {turns: 6}}]`."""
