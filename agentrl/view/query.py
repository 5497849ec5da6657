"""The questions that programs ask of a run: `episodes?reward<1&stop_reason=max_turns&sort=-turns`.

TABLE?CONDITION&CONDITION...&sort=COLUMN&limit=N&fields=A,B. A condition is COLUMN, one of = != < <= > >= ~, and a
value; ~ finds a text, whatever its case. `sort=-COLUMN` begins with the largest. Independent of what tables there are.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from agentrl.errors import ConfigError

_CONDITION = re.compile(r"(?P<column>[^=!<>~]+)(?P<sign>!=|<=|>=|=|<|>|~)(?P<value>.*)", re.DOTALL)
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A test of one column. A row without a value fails it, but for `!=`.

    >>> Condition(column="reward", sign="<", value="1").holds({"reward": 0.5})
    True
    """

    column: str
    sign: str
    value: str

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether the row passes."""
        found = row.get(self.column)
        if self.sign == "~":
            return found is not None and self.value.casefold() in str(found).casefold()
        if self.sign in ("=", "!="):
            return self._equals(found) is (self.sign == "=")
        return isinstance(found, int | float) and _COMPARE[self.sign](found, float(self.value))

    def _equals(self, found: Any) -> bool:
        if isinstance(found, bool):
            return self.value.casefold() == str(found).casefold()
        if isinstance(found, int | float):
            try:
                return float(self.value) == found
            except ValueError:
                return False
        return (self.value.casefold() == "null") if found is None else str(found) == self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A parsed question.

    >>> Query.parse("episodes?reward<1&sort=-turns&limit=5").limit
    5
    """

    table: str
    conditions: tuple[Condition, ...] = ()
    sort: str = ""
    limit: int | None = None
    fields: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, *, option: str = "--json") -> Query:
        """Raises ConfigError for a condition that cannot be read. `option`: where it was written."""
        table, _, rest = text.partition("?")
        options: dict[str, str] = {}
        conditions: list[Condition] = []
        for part in filter(None, rest.split("&")):
            found = _CONDITION.fullmatch(unquote(part))
            if found is None:
                raise ConfigError(f"{option}: {part!r} is no condition: write COLUMN=VALUE, or != < <= > >= ~ for =")
            column, sign, value = found["column"], found["sign"], found["value"]
            if sign == "=" and column in ("sort", "limit", "fields"):
                options[column] = value
            else:
                _check_number(column, sign, value, option)
                conditions.append(Condition(column=column, sign=sign, value=value))
        limit = options.get("limit")
        if limit is not None and not limit.isdecimal():
            raise ConfigError(f"{option}: limit={limit} is no number of rows")
        return cls(
            table=table,
            conditions=tuple(conditions),
            sort=options.get("sort", ""),
            limit=None if limit is None else int(limit),
            fields=tuple(filter(None, options.get("fields", "").split(","))),
        )

    def value_of(self, column: str) -> str | None:
        """What the rows must have in a column, where one condition says so."""
        return next((one.value for one in self.conditions if one.column == column and one.sign == "="), None)

    def check_columns(self, known: Collection[str], *, option: str = "--json") -> None:
        """Raises ConfigError for a column that is in no row; some rows may lack one."""
        wanted = {one.column for one in self.conditions} | {self.sort.removeprefix("-"), *self.fields} - {""}
        wanted.discard("")
        if known and (unknown := sorted(wanted - set(known))):
            near = suggest(unknown[0], known, "Columns")
            raise ConfigError(f"{option}: {self.table} has no column {unknown[0]}. {near}")


def suggest(name: str, known: Iterable[str], what: str) -> str:
    """The names that are near, or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=5)
    return f"Similar: {', '.join(near)}" if near else f"{what}: {', '.join(names)}"


def _check_number(column: str, sign: str, value: str, option: str) -> None:
    if sign in _COMPARE:
        try:
            float(value)
        except ValueError:
            raise ConfigError(f"{option}: {column}{sign}{value}: {value!r} is no number") from None
