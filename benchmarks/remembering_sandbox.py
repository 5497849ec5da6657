"""A sandbox that runs no program twice: studies repeat the same short programs some hundred thousand times.

A result is that of a session's earlier programs and the new one. What may differ from run to run is always executed:
see `is_repeatable`. Every CHECK_EVERY-th remembered result is compared with an execution. Independent of episodes.
"""

from __future__ import annotations

import asyncio
import re

from sandbox.client import SandboxClient, SandboxSession
from sandbox.protocol import ExecResult

Programs = tuple[str, ...]
"""What a session has executed, in order."""
CHECK_EVERY = 500
_VARIES = re.compile(
    r"import(?! math\b(?!\s*[,.]))|open|input|\bid\b|hash|set|\{|globals|locals|vars|dir|exec|eval|getattr|__|while"
)
"""Time, chance, files, addresses and the order of a set need one of these; an endless loop mostly needs `while`. To
import math alone is harmless."""


def is_repeatable(code: str, result: ExecResult) -> bool:
    """Whether every execution after the same programs gives this result.

    >>> is_repeatable("print(6 * 7)", ExecResult(status="ok", stdout="42"))
    True
    >>> is_repeatable("import time; print(time.time())", ExecResult(status="ok", stdout="1.5"))
    False
    """
    is_whole = result.status in ("ok", "error") and not result.state_lost
    return is_whole and _VARIES.search(code) is None and " at 0x" not in result.to_text()


class RememberingSandbox(SandboxClient):
    """A client whose sessions share what they have seen.

    Example::

        async with RememberingSandbox(url, token) as sandbox:
            session = await sandbox.open_session()
            await session.exec("print(6 * 7)")  # executed once, however many sessions ask
    """

    def __init__(self, url: str, token: str | None = None, *, check_every: int = CHECK_EVERY) -> None:
        super().__init__(url, token)
        self.known: dict[Programs, asyncio.Future[ExecResult | None]] = {}
        """Results by a session's programs; None: it may differ."""
        self.num_calls = 0
        self.num_executed = 0
        self._check_every = check_every
        self._num_remembered = 0

    async def open_session(self, *, seed: int | None = None, limits: object = None, ttl_s: object = None) -> _Session:
        """A session that the first unknown program opens in the service. Raises ValueError for limits of its own."""
        if limits is not None or ttl_s is not None:
            raise ValueError("programs are remembered under the default limits only")
        return _Session(self, seed)

    async def new_session(self, seed: int | None) -> SandboxSession:
        """A session of the service. Raises SandboxUnavailable."""
        return await super().open_session(seed=seed)

    def is_to_be_checked(self) -> bool:
        """Whether this remembered result is executed all the same. Counts it."""
        self._num_remembered += 1
        return self._num_remembered % self._check_every == 0


class _Session(SandboxSession):
    """Executes only what is not known. It does not call the constructor of SandboxSession: it has no id yet."""

    def __init__(self, client: RememberingSandbox, seed: int | None) -> None:
        self._memory, self._seed = client, seed
        self._programs: Programs = ()
        self._num_executed = 0
        self._varies = False
        self._real: SandboxSession | None = None

    async def exec(self, code: str, *args: object, **kwargs: object) -> ExecResult:
        """The result, remembered or executed with the default limits. Raises SandboxUnavailable, ValueError.

        Raises RuntimeError where a remembered result is not what an execution gives.
        """
        if args or kwargs:
            raise ValueError("programs are remembered under the default limits only")
        self._memory.num_calls += 1
        self._programs += (code,)
        if self._varies:
            return await self._executed()
        if (known := self._memory.known.get(self._programs)) is None:
            return await self._first()
        if (result := await asyncio.shield(known)) is None:
            self._varies = True
            return await self._executed()
        if self._memory.is_to_be_checked() and (found := await self._executed()).to_text() != result.to_text():
            raise RuntimeError(
                f"after {self._programs[:-1]}, {code!r} gave {found.to_text()!r}, not {result.to_text()!r}"
            )
        return result

    async def _first(self) -> ExecResult:
        """Execute it for all sessions. One that fails or is cancelled leaves nothing behind."""
        promise = asyncio.get_running_loop().create_future()
        self._memory.known[self._programs] = promise
        try:
            result = await self._executed()
        except BaseException:
            del self._memory.known[self._programs]
            promise.set_result(None)
            raise
        self._varies = not is_repeatable(self._programs[-1], result)
        promise.set_result(None if self._varies else result)
        return result

    async def _executed(self) -> ExecResult:
        """Execute the programs that this session's interpreter has not seen yet. The result of the last."""
        if self._real is None:
            self._real = await self._memory.new_session(self._seed)
        while True:
            result = await self._real.exec(self._programs[self._num_executed])
            self._num_executed += 1
            self._memory.num_executed += 1
            if self._num_executed == len(self._programs):
                return result

    async def close(self) -> None:
        """End the session in the service, where it has one."""
        if (real := self._real) is not None:
            self._real = None
            await real.close()
