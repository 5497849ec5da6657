"""Which results of past calls are kept for clients that repeat a request: a number and a size for each session, and a
size for each tenant.

Independent of how calls run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from sandbox.protocol import ExecResult


@dataclass(slots=True)
class _Kept:
    """What is kept for one session or tenant, oldest first."""

    sizes: OrderedDict[tuple[str, str], int] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def add(self, key: tuple[str, str], num_bytes: int) -> None:
        self.remove(key)
        self.sizes[key] = num_bytes
        self.num_bytes += num_bytes

    def remove(self, key: tuple[str, str]) -> None:
        self.num_bytes -= self.sizes.pop(key, 0)


class KeptResults:
    """Counts the results of calls, and says which to forget. The newest of a tenant is never forgotten.

    Args:
        forget: is called with (session id, exec id) of a result that is not kept any longer.
        per_session: how many results of one session are kept.
        session_bytes, tenant_bytes: how large they may be in sum.

    Example:
        kept = KeptResults(forget, per_session=16, session_bytes=2**25, tenant_bytes=2**28)
        kept.add("tenant", "session", "call", result)
    """

    def __init__(
        self, forget: Callable[[str, str], None], *, per_session: int, session_bytes: int, tenant_bytes: int
    ) -> None:
        self._forget = forget
        self._per_session, self._session_bytes, self._tenant_bytes = per_session, session_bytes, tenant_bytes
        self._sessions: dict[str, _Kept] = {}
        self._tenants: dict[str, _Kept] = {}

    def add(self, tenant: str, session_id: str, exec_id: str, result: ExecResult) -> None:
        """Count a result, and forget the oldest ones that exceed a limit."""
        key, num_bytes = (session_id, exec_id), size_bytes(result)
        of_session = self._sessions.setdefault(session_id, _Kept())
        of_tenant = self._tenants.setdefault(tenant, _Kept())
        of_session.add(key, num_bytes)
        of_tenant.add(key, num_bytes)
        while len(of_session.sizes) > 1 and (
            len(of_session.sizes) > self._per_session or of_session.num_bytes > self._session_bytes
        ):
            self._drop(tenant, next(iter(of_session.sizes)))
        while len(of_tenant.sizes) > 1 and of_tenant.num_bytes > self._tenant_bytes:
            self._drop(tenant, next(iter(of_tenant.sizes)))

    def close_session(self, tenant: str, session_id: str) -> None:
        """Stop counting the results of a session that is closed."""
        closed = self._sessions.pop(session_id, None)
        of_tenant = self._tenants.get(tenant)
        if closed is None or of_tenant is None:
            return
        for key in closed.sizes:
            of_tenant.remove(key)
        if not of_tenant.sizes:
            del self._tenants[tenant]

    def _drop(self, tenant: str, key: tuple[str, str]) -> None:
        self._tenants[tenant].remove(key)
        self._sessions[key[0]].remove(key)
        self._forget(*key)


def size_bytes(result: ExecResult) -> int:
    """Memory that the texts of a result take, at most four bytes a character."""
    texts = (result.stdout, result.stderr, result.result or "", result.traceback or "")
    return sum(len(text) * (1 if text.isascii() else 4) for text in texts)
