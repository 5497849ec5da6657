"""The listeners between the parts: loopback by default, a token required, sizes limited, typed records and no pickle.

That a listener on another address is refused without a token: http/test_tokens.py, commands/test_services.py, and the
sandbox's test_lifecycle.py and test_gateway.py.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import NoneType

import httpx
import msgspec
import pytest
import pytest_asyncio

from agentrl.buffer.journal import Journal
from agentrl.chat import proxy
from agentrl.cli.services import orchestrator
from agentrl.config import EngineConfig, SandboxConfig
from agentrl.errors import ConfigError, LearnerReplaced
from agentrl.supervision.serving import serving
from agentrl.training import learner_api as api
from agentrl.training.learner_api import LearnerCalls, create_app
from agentrl.types import Batch, StepOutput, Task, TransferInit, WeightsRef
from sandbox.client import SandboxClient
from tests.agentrl.buffer.buffer_model import USEFUL, make_group
from tests.sandbox.conftest import TOKEN as SANDBOX_TOKEN
from tests.sandbox.conftest import stop_service
from tests.sandbox.tiers import TIERS, why_not

ROOT = Path(__file__).parents[3]
TOKEN = "token-of-the-run"
ROUTES = [
    ("GET", api.BATCH),
    *(("POST", path) for path in (api.STEP, api.TRANSFER, api.WEIGHTS, api.FINISHED)),
]
WITH_BODY = {api.STEP: StepOutput, api.TRANSFER: TransferInit, api.WEIGHTS: WeightsRef}
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
ALLOWED = {
    "trainer/weights/streamed.py"
}  # vLLM's own form of CUDA IPC handles: one machine, one user, loopback, asked for
TORCH_PICKLES = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}


on_the_listeners_loop = pytest.mark.asyncio(loop_scope="module")


class Nobody:
    """Answers every caller that passed the checks that the place is taken."""

    async def session_of(self, learner_id: str) -> LearnerCalls:
        raise LearnerReplaced("the place is taken")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A client, with the token, of the orchestrator's listener."""
    async with (
        serving(create_app(Nobody(), token=TOKEN), host="127.0.0.1", port=0) as url,
        httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}) as client,
    ):
        yield client


def test_every_listener_is_on_loopback_unless_told_otherwise() -> None:
    orchestrators = inspect.signature(orchestrator).parameters["host"].default
    assert {EngineConfig().host, SandboxConfig().host, proxy.HOST, orchestrators} == {"127.0.0.1"}


def test_an_orchestrator_without_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="AGENTRL_TOKEN"):
        create_app(Nobody(), token="")


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", "Bearer tökén", f"Bearer {TOKEN}x"])
@on_the_listeners_loop
async def test_no_route_without_the_token(http: httpx.AsyncClient, method: str, path: str, given: str) -> None:
    headers = httpx.Headers({b"Authorization": given.encode("latin-1")})
    reply = await http.request(method, path, headers=headers, params={"policy_version": 0})
    assert reply.status_code == 401 and TOKEN not in reply.text


@on_the_listeners_loop
async def test_there_is_no_route_but_those(http: httpx.AsyncClient) -> None:
    assert {(await http.get(path)).status_code for path in ("/", "/docs", "/redoc", "/openapi.json", "/v1")} == {404}


@pytest.mark.parametrize("path", WITH_BODY)
@pytest.mark.parametrize("is_chunked", [False, True])
@on_the_listeners_loop
async def test_no_body_grows_beyond_its_limit(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, is_chunked: bool
) -> None:
    monkeypatch.setattr(api, "MAX_BODY_BYTES", 1000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield bytes(500)

    reply = await http.post(path, content=chunks() if is_chunked else bytes(1001))
    assert reply.status_code == 413 and "1000" in reply.text


@on_the_listeners_loop
async def test_a_sender_that_goes_away_is_no_error_of_ours(
    http: httpx.AsyncClient, capfd: pytest.CaptureFixture[str]
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
    head = f"POST {api.STEP} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\n"
    writer.write(head.encode() + b"half")
    await writer.drain()
    writer.close()
    await asyncio.sleep(0.1)
    assert (await http.get(api.BATCH, params={"policy_version": 0})).status_code == 409
    assert "Exception" not in capfd.readouterr().err


async def test_the_agents_side_has_a_limit_for_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MAX_BODY_BYTES", 1000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield bytes(500)

    async with proxy.ChatProxy().session(object()) as endpoint:  # type: ignore[arg-type]  # nobody gets as far as it
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with httpx.AsyncClient(base_url=endpoint.base_url, headers=headers) as client:
            reply = await client.post("/chat/completions", content=chunks())
    assert reply.status_code == 413 and "1000" in reply.text


@pytest.mark.parametrize("path", WITH_BODY)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x80\x04\x95",  # how a pickle begins
        api.encode([1, 2]),
        api.encode({"policy_version": "1"}),
        api.encode({"policy_version": 1, "metrics": {"loss": "0"}}),
        api.encode(msgspec.msgpack.Ext(1, b"x")),
        b"\x91" * 100_000,  # lists in lists
        b"\xdd\xff\xff\xff\xff",  # a list that says it has 2**32 - 1 members
    ],
    ids=["empty", "invalid", "pickle", "list", "types", "nested types", "extension", "deep", "long"],
)
@on_the_listeners_loop
async def test_what_is_no_record_is_refused(http: httpx.AsyncClient, path: str, body: bytes) -> None:
    assert (await http.post(path, content=body)).status_code == 422


def test_records_decode_into_themselves_and_nothing_else() -> None:
    """Every type that may stand in a record that travels is a plain value or another record."""
    seen: set[object] = set()
    todo: list[msgspec.inspect.Type] = [
        msgspec.inspect.type_info(record) for record in (Batch, StepOutput, TransferInit, WeightsRef, Task)
    ]
    while todo:
        found = todo.pop()
        assert not isinstance(found, msgspec.inspect.CustomType | msgspec.inspect.ExtType | msgspec.inspect.RawType)
        if isinstance(found, msgspec.inspect.DataclassType):
            if found.cls not in seen:
                seen.add(found.cls)
                todo += [field.type for field in found.fields]
            continue
        for name in ("item_type", "key_type", "value_type"):
            todo += [inner] if (inner := getattr(found, name, None)) is not None else []
        todo += [*getattr(found, "types", ()), *(getattr(found, "item_types", None) or ())]
    assert {Batch, StepOutput, TransferInit, WeightsRef, Task} < seen


@pytest.mark.parametrize("package", ["agentrl", "sandbox", "trainer"])
def test_nothing_is_pickled_or_unpickled(package: str) -> None:
    pickling, object_collectives = set(), set()
    for path in sorted((ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {each.split(".")[0] for each in imported} & PICKLES:
                pickling.add(name)
            if isinstance(node, ast.Attribute) and node.attr in TORCH_PICKLES:
                object_collectives.add(name)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "numpy.load", "np.load"):
                safe = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert safe.get("weights_only") == "True" or safe.get("allow_pickle") == "False", (name, node.lineno)
    assert pickling <= ALLOWED
    assert not object_collectives


def test_the_journal_holds_plain_values_and_typed_records(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    task = Task(id="t", prompt="?", metadata={"level": 3, "tags": ["a", None]})
    journal.issued(0, task)
    journal.ready(group := make_group(0, task, version=0, rewards=USEFUL))
    journal.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        db.row_factory = sqlite3.Row
        (row,) = db.execute("SELECT * FROM groups").fetchall()
    assert {type(value) for value in tuple(row)} <= {int, str, bytes, NoneType}
    assert api.decode(row["task"], Task) == task
    assert api.decode(row["payload"], type(group)) == group
    with pytest.raises(msgspec.ValidationError):
        api.decode(row["payload"], Batch)


@asynccontextmanager
async def listeners() -> AsyncIterator[tuple[list[int], list[int]]]:
    """Ports on 127.0.0.1 of an orchestrator, an agents' proxy, and a stand-in each for engine and learner; the calls
    that the latter two had."""
    calls: list[int] = []

    def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(writer.get_extra_info("sockname")[1])
        writer.close()

    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(create_app(Nobody(), token=TOKEN), host="127.0.0.1", port=0))
        chat = await stack.enter_async_context(proxy.ChatProxy().session(object()))  # type: ignore[arg-type]
        plain = [await stack.enter_async_context(await asyncio.start_server(called, "127.0.0.1", 0)) for _ in range(2)]
        ports = [server.sockets[0].getsockname()[1] for server in plain]
        yield [httpx.URL(url).port or 0, httpx.URL(chat.base_url).port or 0, *ports], calls


REACH = """
import socket
reached = []
for port in {ports}:
    for host in ("127.0.0.1", "localhost", "0.0.0.0", "::1", "::ffff:127.0.0.1", socket.gethostname()):
        try:
            socket.create_connection((host, port), timeout=1).close()
            reached.append((host, port))
        except OSError:
            pass
print(reached)
"""


@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
async def test_code_in_the_sandbox_reaches_none_of_the_others(tier: str) -> None:
    if reason := why_not(TIERS[tier]):
        pytest.skip(reason)
    async with listeners() as (ports, calls):
        for port in ports:  # they are there
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
        await asyncio.sleep(0.05)
        assert calls == ports[2:]
        service = await asyncio.to_thread(TIERS[tier].start, slots=1)
        try:
            async with SandboxClient(service.url, SANDBOX_TOKEN) as client, client.session() as session:
                result = await session.exec(REACH.replace("{ports}", repr([*ports, httpx.URL(service.url).port])), 20)
        finally:
            await asyncio.to_thread(stop_service, service)
    assert (result.status, result.stdout.strip()) == ("ok", "[]")
    assert calls == ports[2:]
