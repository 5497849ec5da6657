"""The base of every section of a config, and the choices of a key that is one of several names.

Independent of any particular section. `agentrl/config/reference.py` reads both to document them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema


class Section(BaseModel):
    """A frozen node of the config tree. Unknown keys are refused.

    The string below each field is its documentation: `agentrl config` and docs/config.md show it.

    Example:
        >>> class Cooking(Section):
        ...     minutes: int = 5
        >>> Cooking(minutes=7).minutes
        7
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class Choices:
    """The names that a key takes, with one line on each, as an annotation of its type.

    On a `Literal` the names must be those of the type: declaring a section raises TypeError otherwise. On `str` the
    names are the known ones, and others are permitted.

    Example:
        >>> from typing import Annotated, Literal
        >>> Colour = Annotated[Literal["red", "blue"], Choices({"red": "warm", "blue": "cold"})]
    """

    def __init__(self, lines: Mapping[str, str]) -> None:
        self.lines = lines

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        names = get_args(source)
        if names and names != tuple(self.lines):
            raise TypeError(f"the choices {list(names)} and the lines on them, {list(self.lines)}, are not the same")
        return handler(source)
