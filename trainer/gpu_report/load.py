"""Load on a server: concurrent sessions of several turns, through our client or through bare sockets.

The bare generator sends byte for byte what our client sent (a relay recorded it) and looks for the end of the answer,
nothing else. Both run on the same asyncio, in whatever process calls them. Writes no report.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.types import Sampling

END_OF_HEAD, END_OF_STREAM = b"\r\n\r\n", b"\r\n0\r\n\r\n"
CALL_DEADLINE_S = 300.0

Requests = Mapping[str, bytes]  # whole HTTP requests by request id


@dataclass(frozen=True, kw_only=True)
class Script:
    """What one session asks: the prompt of every turn begins with the one before, and what came of it."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int

    def request_ids(self) -> list[str]:
        """One a turn."""
        return [f"{self.name}-{turn}" for turn in range(len(self.prompts))]


@dataclass(frozen=True, kw_only=True)
class Load:
    """The time that many concurrent sessions took."""

    wall_s: float
    cpu_s: float  # of the generator's own process
    latencies_s: tuple[float, ...]  # one a call
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens."""
        return self.num_tokens / self.wall_s

    @property
    def cpu_ms_a_call(self) -> float:
        """CPU time of the generator's process."""
        return 1e3 * self.cpu_s / len(self.latencies_s)


def scripts(
    num_sessions: int, *, num_turns: int, first_tokens: int, observation_tokens: int, max_tokens: int, vocab_size: int
) -> list[Script]:
    """Sessions that share no prefix. Random tokens stand in for completions, so that every run asks the same."""
    found = []
    for session in range(num_sessions):
        draw = random.Random(session)
        ids = [draw.randrange(vocab_size) for _ in range(first_tokens)]
        prompts = [tuple(ids)]
        for _ in range(num_turns - 1):
            ids += [draw.randrange(vocab_size) for _ in range(max_tokens + observation_tokens)]
            prompts.append(tuple(ids))
        found.append(Script(name=f"s{session}", prompts=tuple(prompts), max_tokens=max_tokens))
    return found


def through_our_client(url: str, model: str, sessions: Sequence[Script]) -> Load:
    """All sessions at once through one VLLMEngine. Raises RuntimeError when tokens are missing."""
    return asyncio.run(_through_our_client(url, model, sessions))


async def _through_our_client(url: str, model: str, sessions: Sequence[Script]) -> Load:
    async with VLLMEngine(url, model=model, request_timeout_s=CALL_DEADLINE_S) as engine:

        async def call(script: Script, turn: int) -> None:
            sampling = Sampling(max_tokens=script.max_tokens)
            name = script.request_ids()[turn]
            completion = await engine.generate(script.prompts[turn], sampling, request_id=name, session_id=script.name)
            if len(completion.token_ids) != script.max_tokens:
                raise RuntimeError(f"{name}: {len(completion.token_ids)} tokens, not {script.max_tokens}")

        return await _all_at_once(sessions, lambda script: _sequence(script, call))


def through_sockets(url: str, requests: Requests, sessions: Sequence[Script]) -> Load:
    """All sessions at once, each on a socket of its own; nothing is decoded."""
    return asyncio.run(_through_sockets(url, requests, sessions))


async def _through_sockets(url: str, requests: Requests, sessions: Sequence[Script]) -> Load:
    async def play(script: Script) -> list[float]:
        connection = await Connection.open(url)

        async def call(script: Script, turn: int) -> None:
            await connection.ask(requests[script.request_ids()[turn]])

        try:
            return await _sequence(script, call)
        finally:
            connection.close()

    return await _all_at_once(sessions, play)


async def _sequence(script: Script, call: Callable[[Script, int], Awaitable[None]]) -> list[float]:
    latencies_s = []
    for turn in range(len(script.prompts)):
        began = time.perf_counter()
        await call(script, turn)
        latencies_s.append(time.perf_counter() - began)
    return latencies_s


async def _all_at_once(sessions: Sequence[Script], play: Callable[[Script], Awaitable[list[float]]]) -> Load:
    began, cpu_began = time.perf_counter(), time.process_time()
    played = await asyncio.gather(*(play(script) for script in sessions))
    return Load(
        wall_s=time.perf_counter() - began,
        cpu_s=time.process_time() - cpu_began,
        latencies_s=tuple(latency_s for latencies_s in played for latency_s in latencies_s),
        num_tokens=sum(len(script.prompts) * script.max_tokens for script in sessions),
    )


class Connection(asyncio.Protocol):
    """A socket that waits for the end of one answer after the other, streamed or not, and reads nothing else of it."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._answered: asyncio.Future[None] | None = None
        self._tail, self._num_read, self._num_wanted = b"", 0, -1

    @classmethod
    async def open(cls, url: str) -> Connection:
        """To the server at `url`."""
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def close(self) -> None:
        """Close the socket."""
        self._transport.close()

    async def ask(self, request: bytes) -> None:
        """Return when the whole answer came. Raises RuntimeError when it is a refusal or the socket breaks."""
        self._answered = asyncio.get_running_loop().create_future()
        self._tail, self._num_read, self._num_wanted = b"", 0, -1
        self._transport.write(request)
        await self._answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(RuntimeError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        assert self._answered is not None
        if self._num_wanted < 0:
            self._tail += data
            if END_OF_HEAD not in self._tail:
                return
            self._read_head(*self._tail.split(END_OF_HEAD, 1))
        else:
            self._num_read += len(data)
            self._tail = (self._tail + data)[-len(END_OF_STREAM) :]
        is_whole = self._num_read >= self._num_wanted if self._num_wanted else self._tail.endswith(END_OF_STREAM)
        if is_whole and not self._answered.done():
            self._answered.set_result(None)

    def _read_head(self, head: bytes, rest: bytes) -> None:
        assert self._answered is not None
        if b" 200 " not in head[:20]:
            self._answered.set_exception(RuntimeError(f"refused: {head[:60]!r}"))
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        self._num_wanted = int(length[1]) if length else 0  # 0: in chunks, up to an empty one
        self._num_read, self._tail = len(rest), rest[-len(END_OF_STREAM) :]


def record(url: str, model: str, sessions: Sequence[Script]) -> Requests:
    """What our client sends for these sessions: it plays them through a relay."""
    return asyncio.run(_record(url, model, sessions))


async def _record(url: str, model: str, sessions: Sequence[Script]) -> Requests:
    requests: dict[str, bytes] = {}
    server = urlsplit(url)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(server.hostname, server.port)
        answers = asyncio.create_task(_pump(upstream_reader, writer))
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    request = await _read_request(reader)
                    if name := re.search(rb'"request_id":"([^"]+)"', request):
                        requests[name[1].decode()] = request
                    upstream_writer.write(request)
        finally:
            answers.cancel()
            upstream_writer.close()
            writer.close()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        await _through_our_client(f"http://127.0.0.1:{port}", model, sessions)
    wanted = {name for script in sessions for name in script.request_ids()}
    if wanted != requests.keys():
        raise RuntimeError(f"{len(wanted ^ requests.keys())} of {len(wanted)} requests were not recorded")
    return requests


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(END_OF_HEAD)
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    return head + (await reader.readexactly(int(length[1])) if length else b"")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)


def not_streamed(request: bytes) -> bytes:
    """The same request for one answer at the end. Raises ValueError when it asks for that already."""
    head, body = request.split(END_OF_HEAD, 1)
    changed = body.replace(b'"stream":true', b'"stream":false')
    if changed == body:
        raise ValueError("the request asks for no stream")
    head = re.sub(rb"(?i)(content-length: *)\d+", rb"\g<1>%d" % len(changed), head)
    return head + END_OF_HEAD + changed


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Latencies of calls made one at a time, ours and bare in turns."""

    ours_s: tuple[float, ...]
    bare_s: tuple[float, ...]


def in_turns(url: str, model: str, requests: Requests, sessions: Sequence[Script]) -> Paired:
    """The first turn of each session, once each way and one at a time; who goes first alternates."""
    return asyncio.run(_in_turns(url, model, requests, sessions))


async def _in_turns(url: str, model: str, requests: Requests, sessions: Sequence[Script]) -> Paired:
    ours_s, bare_s = [], []
    connection = await Connection.open(url)
    async with VLLMEngine(url, model=model, request_timeout_s=CALL_DEADLINE_S) as engine:
        for number, script in enumerate(sessions):
            name, sampling = script.request_ids()[0], Sampling(max_tokens=script.max_tokens)
            for is_ours in (number % 2 == 0, number % 2 == 1):
                began = time.perf_counter()
                if is_ours:
                    await engine.generate(script.prompts[0], sampling, request_id=name)
                    ours_s.append(time.perf_counter() - began)
                else:
                    await connection.ask(requests[name])
                    bare_s.append(time.perf_counter() - began)
    connection.close()
    return Paired(ours_s=tuple(ours_s), bare_s=tuple(bare_s))
