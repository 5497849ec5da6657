"""Hostile bodies: none stops the service, fills its memory, or is read before the token is known."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from sandbox.bodies import MAX_TABLE_ENTRIES, BodyRefused, decode
from sandbox.kept import KeptResults
from sandbox.protocol import MAX_FILE_BYTES, MAX_SESSION_BODY_BYTES, ExecRequest, ExecResult, SessionRequest
from sandbox.server import MAX_BODY_BYTES, MAX_FETCHED_BYTES, MAX_INCOMING_BYTES, RunCodeRequest
from tests.sandbox.conftest import SECOND_TOKEN, TOKEN, Service, start_service, stop_service

DEEP = b"[" * 200_000
WIDE_BYTES = 90 * 1024**2
WIDE = b"[" + b"[]," * (WIDE_BYTES // 3) + b"[]]"
MANY_KEYS = b"{" + b",".join(b'"%d":""' % number for number in range(100_000)) + b"}"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = start_service("--backend", "unsafe", "--allow-unsafe", "--preload", "", "--token-env", "TEST_TOKENS")
    yield service
    stop_service(service)


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=60) as http:
        yield http


def peak_bytes(service: Service) -> int:
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_a_bomb_of_90_mb_takes_little_more_memory_than_its_bytes(service: Service, http: httpx.Client) -> None:
    session_id = http.post("/v1/sessions", json={}).json()["session_id"]
    before_bytes = peak_bytes(service)
    for path, field in ((f"/v1/sessions/{session_id}/exec", b"extra"), ("/run_code", b"files")):
        reply = http.post(path, content=b'{"code": "1", "%s": %s}' % (field, WIDE))
        assert (reply.status_code, reply.json()["error"]) == (422, "invalid")
    assert peak_bytes(service) - before_bytes < 5 * WIDE_BYTES  # decoded, the lists alone take 25 times as much
    assert http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        DEEP,
        b'{"exec_id": ' + DEEP,
        b'{"exec_id": "\\ud800", "code": "1", "x": [' + b"[]," * 30_000 + b"[]]}",
        b'{"exec_id": "\\ud800", "code": [' + b"[]," * 30_000 + b'[]], "code": "1"}',
        b'{"exec_id": "e", "code": "1", "timeout_s": ' + b"[" * 60_000 + b"]" * 60_000 + b"}",
        b'{"exec_id": "e", "code": "1", "timeout_s": ' + b"9" * 100_000 + b"}",
        b'{"exec_id": "e", "code": "1", "timeout_s": ' + b"9" * 60_000 + b"}",
        b'{"exec_id": "e", "code": "1", "x": ' + MANY_KEYS + b"}",
        MANY_KEYS,
        b"\xff\xfe",
        b'{"exec_id": "e", "code": "\xff"}',
        b"",
        b"[]",
        b"null",
    ],
    ids=[
        "deep",
        "deep-open",
        "surrogate",
        "twice",
        "deep-field",
        "long-number",
        "number",
        "keys",
        "only-keys",
        "bytes",
        "text",
        *"elN",
    ],
)
def test_what_is_no_record_is_refused(http: httpx.Client, body: bytes) -> None:
    session_id = http.post("/v1/sessions", json={}).json()["session_id"]
    other = body.replace(b"timeout_s", b"run_timeout").replace(b'"x"', b'"files"')
    for path, content in ((f"/v1/sessions/{session_id}/exec", body), ("/run_code", other)):
        reply = http.post(path, content=content)
        assert (reply.status_code, reply.json()["error"]) == (422, "invalid"), path
    if len(body) <= MAX_SESSION_BODY_BYTES:
        assert http.post("/v1/sessions", content=body).status_code == 422


def announce(service: Service, path: str, num_bytes: int, *more: str, token: str = TOKEN) -> socket.socket:
    """A connection on which only the head of a request was sent."""
    host, port = service.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {token}",
        f"Content-Length: {num_bytes}",
        *more,
    ]
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    return connection


def status_of(connection: socket.socket) -> int:
    head = b""
    while b"\r\n" not in head:
        data = connection.recv(4096)
        assert data, "closed without an answer"
        head += data
    return int(head.split()[1])


@pytest.mark.parametrize(
    ("path", "num_bytes", "token", "status"),
    [
        ("/run_code", MAX_BODY_BYTES, "wrong", 401),
        ("/v1/sessions", 100, "", 401),
        ("/run_code", MAX_BODY_BYTES + 1, TOKEN, 413),
        ("/v1/sessions", MAX_SESSION_BODY_BYTES + 1, TOKEN, 413),
        ("/v1/sessions/unknown/exec", MAX_BODY_BYTES, TOKEN, 404),
    ],
)
def test_a_refusal_comes_before_the_body(service: Service, path: str, num_bytes: int, token: str, status: int) -> None:
    with announce(service, path, num_bytes, token=token) as connection:
        assert status_of(connection) == status


def test_a_body_without_a_length_is_refused(http: httpx.Client) -> None:
    assert http.post("/run_code", content=iter([b"{}"])).status_code == 411


def test_the_bodies_of_one_tenant_together_have_a_size(service: Service, http: httpx.Client) -> None:
    big = MAX_INCOMING_BYTES // 3 + 1
    expecting = "Expect: 100-continue"  # answered when the service begins to read the body
    with ExitStack() as held:
        for _ in range(2):
            assert status_of(held.enter_context(announce(service, "/run_code", big, expecting))) == 100
        assert status_of(held.enter_context(announce(service, "/run_code", big, expecting))) == 429
        other = announce(service, "/run_code", big, expecting, token=SECOND_TOKEN)
        assert status_of(held.enter_context(other)) == 100
        assert http.post("/run_code", json={"code": "1"}).status_code == 200


def test_hard_links_do_not_multiply_what_is_fetched(http: httpx.Client) -> None:
    num_links = MAX_FETCHED_BYTES // MAX_FILE_BYTES + 1
    code = (
        f"import os\nopen('0', 'wb').truncate({MAX_FILE_BYTES})\nfor n in range(1, {num_links}): os.link('0', str(n))"
    )
    names = [str(number) for number in range(num_links)]
    reply = http.post("/run_code", json={"code": code, "fetch_files": names})
    assert (reply.status_code, reply.json()["error"]) == (400, "file_refused") and "in sum" in reply.text
    reply = http.post("/run_code", json={"code": code, "fetch_files": ["0"] * 100})
    assert len(base64.b64decode(reply.json()["files"]["0"])) == MAX_FILE_BYTES
    assert http.post("/run_code", json={"code": "", "fetch_files": ["x"] * (MAX_TABLE_ENTRIES + 1)}).status_code == 422


def test_every_body_that_is_in_order_is_decoded_as_before() -> None:
    code = "'\ud800 \u20ac' # " + "x" * 100_000
    body = json.dumps({"exec_id": "e", "code": code, "stdin": None, "timeout_s": 2}).encode()
    assert decode(body, ExecRequest) == ExecRequest(exec_id="e", code=code, timeout_s=2)
    assert decode(b'{"limits": {"num_processes": 7}}', SessionRequest).limits is not None
    files = {f"{number}": "A" * 1000 for number in range(MAX_TABLE_ENTRIES)}
    body = json.dumps({"code": "", "files": files, "compile_timeout": [1, {"x": 2}]}).encode()
    assert decode(body, RunCodeRequest).files == files
    files["one-more"] = ""
    with pytest.raises(BodyRefused, match=r"body\.files: at most 256 entries"):
        decode(json.dumps({"code": "", "files": files}).encode(), RunCodeRequest)
    with pytest.raises(BodyRefused, match=r"unknown field `cod`"):
        decode(b'{"exec_id": "e", "cod": ""}', ExecRequest)
    with pytest.raises(BodyRefused, match=r"body\.seed"):
        decode(b'{"seed": -1}', SessionRequest)


def test_kept_results_have_a_number_and_a_size_for_each_session_and_tenant() -> None:
    forgotten: list[tuple[str, str]] = []
    kept = KeptResults(
        lambda session, call: forgotten.append((session, call)), per_session=3, session_bytes=100, tenant_bytes=150
    )

    def add(session: str, call: str, num_bytes: int, tenant: str = "0") -> list[tuple[str, str]]:
        forgotten.clear()
        kept.add(tenant, session, call, ExecResult(status="ok", stdout="x" * num_bytes))
        return list(forgotten)

    assert [add("a", name, 1) for name in "123"] == [[], [], []]
    assert add("a", "4", 1) == [("a", "1")]
    assert add("a", "5", 99) == [("a", "2"), ("a", "3")]
    assert add("b", "1", 51) == [("a", "4")]
    assert add("b", "2", 1000) == [("b", "1"), ("a", "5")]  # the newest stays, whatever its size
    assert add("c", "1", 150, tenant="1") == []
    kept.close_session("0", "b")
    assert add("a", "6", 100) == []
