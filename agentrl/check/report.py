"""What a check finds: one line each, as `ok`, `warn` or `FAIL`; and how it passes from the process that checks.

Independent of how checks are made and shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.errors import EnvError

Level = Literal["ok", "warn", "FAIL"]
TIMEOUT_S = 8.0
"""Deadline of one call of an environment's method in a check."""

MAX_CHARACTERS = 4000
"""Of what one check says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check.

    Check(name="tasks", detail="30 test tasks")
    """

    name: str
    detail: str
    level: Level = "ok"

    @property
    def ok(self) -> bool:
        """False for what keeps the environment from being trained on; a warning does not."""
        return self.level != "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """All checks, in the order they were made.

    report = await check_env(Capitals, data=None, sandbox=None)
    assert report.ok, [check for check in report.checks if not check.ok]
    """

    env: str
    checks: tuple[Check, ...]
    printed: str = ""
    """The end of what the environment printed, where it was checked in a process of its own."""

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(check.ok for check in self.checks)


OnCheck = Callable[[Check], None]
OnProgress = Callable[[int, int], None]


def ignore(*_: object) -> None:
    """For a caller that needs no news while the checks run."""


class Finding(Exception):
    """A failed check; the text says what is wrong, where, and what to write instead."""


class Hung(EnvError):
    """A call did not return: what comes after it would hang as well, so the checks end."""


def shown(text: str) -> str:
    """`text` as it can be passed on: at most MAX_CHARACTERS, and valid Unicode."""
    cut = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."
    return cut.encode(errors="replace").decode()


def require(ok: bool, finding: str) -> None:
    """Raise Finding unless `ok`."""
    if not ok:
        raise Finding(finding)


BLOCKED = 3
"""Exit code of a process that ended itself because the environment blocked it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to check.

    Request(target="shop.py:Shop", kwargs={}, data=None, limit=None, tokenizer=None, timeout_s=8.0, path=sys.path)
    """

    target: str
    kwargs: Mapping[str, Any]
    data: str | None
    limit: int | None
    tokenizer: str | None
    timeout_s: float
    path: list[str]  # sys.path of the caller


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """One line. Without any field: the process is alive.

    News(begin="tasks")
    """

    begin: str | None = None
    check: Check | None = None
    progress: tuple[int, int] | None = None
    cannot_start: str | None = None  # the message of a ConfigError
    ended: str | None = None  # the name of the class
