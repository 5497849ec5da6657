"""How many sessions and connections fit into the limit of open files. Independent of what they are used for.

Without this, a service that runs out of descriptors neither accepts connections nor starts sessions, and says nothing.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass

MAX_CONNECTIONS = 4096
_OF_THE_SERVICE = 128  # libraries, the zygote, control groups and sessions that are being started
_OF_A_SESSION = 7
_MORE_CONNECTIONS = 16  # than slots, at least: for health, metrics and those who wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What fits.

    >>> capacity(256, slots=2, warm=2, max_sessions=1024)
    Capacity(sessions=8, connections=57)
    """

    sessions: int
    connections: int


def capacity(limit: int, *, slots: int, warm: int, max_sessions: int) -> Capacity:
    """Share `limit` open files out. Raises ValueError when not even the slots can be served."""
    fewest = slots + _MORE_CONNECTIONS
    needed = _OF_THE_SERVICE + _OF_A_SESSION * (warm + slots) + fewest
    if limit < needed:
        raise ValueError(
            f"this process may open {limit} files, and {slots} slots with {warm} warm sessions need {needed}: "
            f"raise the limit (ulimit -n {needed}, LimitNOFILE=, --ulimit nofile=), or lower --slots and --warm"
        )
    rest = limit - _OF_THE_SERVICE - _OF_A_SESSION * warm
    connections = min(MAX_CONNECTIONS, max(fewest, rest // 2))
    return Capacity(sessions=min(max_sessions, (rest - connections) // _OF_A_SESSION), connections=connections)


def raise_limit() -> int:
    """Raise the limit of open files to the most that is allowed. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if limit == resource.RLIM_INFINITY else limit
