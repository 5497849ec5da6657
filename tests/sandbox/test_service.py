"""The service as its clients see it: tokens, sessions, idempotency, files, overload, disconnects."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import time
import uuid

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.client import SandboxClient, SandboxSession, SandboxUnavailable, SessionLost
from sandbox.protocol import ExecResult, Limits, SessionReply
from tests.sandbox.conftest import SECOND_TOKEN, TOKEN, Service


def order(code: str, **more: object) -> dict[str, object]:
    return {"exec_id": uuid.uuid4().hex, "code": code, **more}


async def test_variables_live_from_call_to_call(session: SandboxSession) -> None:
    assert (await session.exec("x = 20\ndef f(n): return n + 1")).result is None
    assert (await session.exec("f(x) * 2")).result == "42"


async def test_an_interrupted_program_keeps_its_state(session: SandboxSession) -> None:
    await session.exec("x = 1")
    assert (await session.exec("print('begun')\nwhile True: x += 0", timeout_s=0.3)).stdout == "begun\n"
    after = await session.exec("x")
    assert (after.result, after.state_lost) == ("1", False)


async def test_a_traceback_shows_the_cell_and_not_the_worker(session: SandboxSession) -> None:
    result = await session.exec("def f():\n    return 1 / 0\nf()")
    assert result.traceback is not None
    assert "return 1 / 0" in result.traceback and "worker.py" not in result.traceback
    assert result.to_text().endswith("ZeroDivisionError: division by zero")


async def test_equal_seeds_give_equal_numbers(client: SandboxClient) -> None:
    code = "import random, numpy\n(random.random(), float(numpy.random.rand()), hash('a'))"
    results = []
    for seed in (7, 7, 8, None, None):
        async with client.session(seed=seed) as session:
            results.append((await session.exec(code)).result)
    assert results[0] == results[1]
    assert len(set(results)) == 4


async def test_sympy_is_seeded_for_each_session(client: SandboxClient) -> None:
    drawn = []
    for seed in (7, 7, 8, None, None):
        async with client.session(seed=seed) as session:
            result = await session.exec("from sympy.core.random import rng; rng.random()")
            drawn.append(result.result)
    assert drawn[0] == drawn[1] and len(set(drawn)) == 4


async def test_a_fresh_interpreter_is_seeded_again(client: SandboxClient) -> None:
    async with client.session(seed=7) as session:
        first = await session.exec("import random; random.random()")
        await session.exec("import os; os._exit(1)")
        again = await session.exec("import random; random.random()")
    assert again.state_lost and again.result == first.result


async def test_libraries_that_load_lazily_work(session: SandboxSession) -> None:
    result = await session.exec("import sympy; x = sympy.Symbol('x'); str(sympy.integrate(sympy.sin(x)**2, (x, 0, 1)))")
    assert result.status == "ok"
    assert (await session.exec("import numpy; numpy.linalg.det(numpy.eye(3)).item()")).result == "1.0"


async def test_usage_is_measured(session: SandboxSession) -> None:
    result = await session.exec("import time\nwhile time.process_time() < 0.3: pass\nx = bytearray(50_000_000)", 5)
    assert 0.15 < result.cpu_s < 2
    assert result.peak_rss_bytes > 50_000_000


async def test_limits_of_a_session_are_clamped_and_hold(client: SandboxClient) -> None:
    async with client.session(limits=Limits(memory_bytes=64 * 1024**2, num_processes=4000)) as session:
        assert session.limits == Limits(memory_bytes=64 * 1024**2, num_processes=32)
        assert (await session.exec("x = bytearray(100 * 2**20)")).status in {"error", "oom"}
        assert (await session.exec("y = bytearray(10 * 2**20)")).status == "ok"


async def test_the_same_exec_id_runs_once(session: SandboxSession, http: httpx.AsyncClient) -> None:
    path = f"{session._path}/exec"
    await http.post(path, json=order("n = 0"))
    body = order("import time; time.sleep(0.2); n += 1; n")
    first, second = await asyncio.gather(http.post(path, json=body), http.post(path, json=body))
    third = await http.post(path, json=body)
    assert first.json() == second.json() == third.json()
    assert first.json()["result"] == "1"
    assert (await http.post(path, json=order("n"))).json()["result"] == "1"


async def test_the_same_idempotency_key_opens_one_session(http: httpx.AsyncClient) -> None:
    body = {"idempotency_key": uuid.uuid4().hex}
    replies = [(await http.post("/v1/sessions", json=body)).json()["session_id"] for _ in range(2)]
    assert replies[0] == replies[1]
    assert (await http.delete(f"/v1/sessions/{replies[0]}")).status_code == 200


@pytest.mark.parametrize("token", [None, "x", "wrong", TOKEN[:-1]])
async def test_a_wrong_token_opens_nothing(service: Service, token: str | None) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=service.url, headers=headers) as http:
        for method, path in (("POST", "/v1/sessions"), ("POST", "/run_code"), ("DELETE", "/v1/sessions/x")):
            assert (await http.request(method, path, json={})).status_code == 401
        assert (await http.get("/healthz")).status_code == 200


async def test_another_tenants_session_does_not_exist(client: SandboxClient, service: Service) -> None:
    async with client.session() as session:
        await session.exec("x = 1")
        async with SandboxClient(service.url, SECOND_TOKEN) as stranger:
            with pytest.raises(SessionLost):
                await stranger.call("POST", f"{session._path}/exec", content=json.dumps(order("x")).encode())
            with pytest.raises(SessionLost):
                await stranger.call("DELETE", session._path)
        assert (await session.exec("x")).result == "1"


async def test_a_closed_session_is_lost(client: SandboxClient) -> None:
    session = await client.open_session()
    await session.close()
    await session.close()
    with pytest.raises(SessionLost):
        await session.exec("1")


async def test_a_cancelled_close_still_closes(client: SandboxClient) -> None:
    session = await client.open_session()
    closing = asyncio.create_task(session.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with asyncio.timeout(5):
        while True:
            try:
                await session.exec("1")
            except SessionLost:
                break


async def test_a_session_whose_opening_is_cancelled_is_given_back(client: SandboxClient) -> None:
    before = (await client.health()).sessions
    for delay_s in (0.0, 0.002, 0.01):
        opening = asyncio.create_task(client.open_session())
        await asyncio.sleep(delay_s)
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled():
            await opening.result().close()
    async with asyncio.timeout(5):
        while client._closing or (await client.health()).sessions > before:
            await asyncio.sleep(0.01)


async def until_running(client: SandboxClient, number: int) -> None:
    async with asyncio.timeout(30):
        while (await client.health()).running != number:
            await asyncio.sleep(0.02)


async def test_closing_ends_a_running_program(client: SandboxClient) -> None:
    session = await client.open_session()
    running = asyncio.create_task(session.exec("while True: pass", timeout_s=60))
    await until_running(client, 1)
    running.cancel()
    began = time.monotonic()
    await session.close()
    assert time.monotonic() - began < 20
    await until_running(client, 0)


async def test_a_vanished_client_frees_its_slot(
    service: Service, session: SandboxSession, http: httpx.AsyncClient
) -> None:
    path = f"{session._path}/exec"
    async with httpx.AsyncClient(base_url=service.url, headers={"Authorization": f"Bearer {TOKEN}"}) as other:
        with pytest.raises(httpx.ReadTimeout):
            patience = httpx.Timeout(30, read=0.3)
            await other.post(path, json=order("while True: pass", timeout_s=100), timeout=patience)
    async with asyncio.timeout(30):
        while (await http.get("/healthz")).json()["running"]:
            await asyncio.sleep(0.05)
    assert (await http.post(path, json=order("1 + 1"))).json()["result"] == "2"


async def test_queueing_is_not_charged_to_the_program(client: SandboxClient) -> None:
    """Seven rounds on four slots: the last programs wait 1.8 s or more, and may run for 1.5 s."""

    async def sleeper() -> ExecResult:
        async with client.session() as session:
            return await session.exec("import time; time.sleep(0.3)", timeout_s=1.5)

    results = await asyncio.gather(*(sleeper() for _ in range(28)))
    assert {result.status for result in results} == {"ok"}
    assert max(result.queue_s for result in results) > 1.5


async def test_what_waited_too_long_is_never_run(client: SandboxClient) -> None:
    async def sleeper() -> ExecResult:
        async with client.session() as session:
            return await session.exec("import time; time.sleep(100)", timeout_s=100)

    async with asyncio.TaskGroup() as group:
        sleepers = [group.create_task(sleeper()) for _ in range(4)]
        await until_running(client, 4)
        async with client.session() as late:
            with pytest.raises(SandboxUnavailable, match="no slot came free"):
                await late.exec("x = 1", max_queue_s=0.2)
            for sleeping in sleepers:
                sleeping.cancel()
            assert (await late.exec("x")).status == "error"


async def test_many_sessions_stay_open_beside_few_slots(client: SandboxClient) -> None:
    sessions = await asyncio.gather(*(client.open_session() for _ in range(40)))
    await asyncio.gather(*(session.exec(f"x = {number}") for number, session in enumerate(sessions)))
    results = await asyncio.gather(*(session.exec("x") for session in sessions))
    await asyncio.gather(*(session.close() for session in sessions))
    assert [result.result for result in results] == [str(number) for number in range(40)]


async def test_files_go_in_and_out(session: SandboxSession) -> None:
    await session.put_file("data/in.bin", b"\x00\xff")
    assert (await session.exec("open('data/in.bin', 'rb').read()")).result == "b'\\x00\\xff'"
    await session.exec("open('out.txt', 'w').write('é')")
    assert await session.get_file("out.txt") == "é".encode()


@pytest.mark.parametrize(
    "path", ["..%2f..%2fetc/passwd", "%2fetc%2fpasswd", "link", "folder/x", "pipe", "missing", "%2e"]
)
async def test_files_are_not_reached_through_tricks(
    session: SandboxSession, http: httpx.AsyncClient, path: str
) -> None:
    await session.exec("import os; os.symlink('/etc/passwd', 'link'); os.symlink('/etc', 'folder'); os.mkfifo('pipe')")
    reply = await http.get(f"{session._path}/files/{path}")
    assert reply.status_code in {400, 404}
    assert "root:" not in reply.text


async def test_files_have_a_size(session: SandboxSession, http: httpx.AsyncClient) -> None:
    assert (await http.put(f"{session._path}/files/x", content=b"x" * (9 * 1024**2))).status_code == 413
    await session.exec("open('big', 'wb').write(b'x' * (9 * 2**20))")
    assert (await http.get(f"{session._path}/files/big")).status_code == 400


async def test_run_code_speaks_sandbox_fusion(http: httpx.AsyncClient) -> None:
    files = {"in.txt": base64.b64encode(b"41").decode()}
    body = {
        "code": "n = int(open('in.txt').read()) + 1\nprint(n)\nopen('out', 'w').write(str(n))",
        "language": "python",
    }
    reply = (await http.post("/run_code", json={**body, "files": files, "fetch_files": ["out"]})).json()
    assert (reply["status"], reply["run_result"]["status"], reply["run_result"]["stdout"]) == (
        "Success",
        "Finished",
        "42\n",
    )
    assert base64.b64decode(reply["files"]["out"]) == b"42"
    failed = (await http.post("/run_code", json={"code": "1/0"})).json()
    assert failed["status"] == "Failed" and failed["run_result"]["return_code"] == 1
    slow = (await http.post("/run_code", json={"code": "while True: pass", "run_timeout": 0.3})).json()
    assert slow["run_result"]["status"] == "TimeLimitExceeded"


async def test_metrics_count_executions(session: SandboxSession, http: httpx.AsyncClient) -> None:
    await session.exec("1/0")
    text = (await http.get("/metrics")).text
    assert 'sandbox_executions_total{status="error"}' in text
    assert "sandbox_warm" in text


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    key=st.sampled_from(["exec_id", "code", "timeout_s", "stdin", "max_output_bytes", "extra"]),
)
async def test_no_body_makes_a_500(service: Service, body: object, key: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=service.url, headers=headers, timeout=20) as http:
        session_id = (await http.post("/v1/sessions", json={})).json()["session_id"]
        for content in (body, {**order("1", timeout_s=1), key: body}):
            reply = await http.post(f"/v1/sessions/{session_id}/exec", content=json.dumps(content).encode())
            assert reply.status_code in {200, 422}
            assert "error" in reply.json() or reply.json()["status"] in {"ok", "error", "timeout"}
        await http.delete(f"/v1/sessions/{session_id}")


async def test_an_absent_service_raises_after_bounded_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.client.BACKOFF_S", 0.01)
    began = time.monotonic()
    async with SandboxClient("http://127.0.0.1:9") as client:
        with pytest.raises(SandboxUnavailable):
            await client.open_session()
    assert time.monotonic() - began < 10


async def test_closing_a_session_of_a_dead_service_is_quick(client: SandboxClient) -> None:
    async with client.session() as session, SandboxClient("http://127.0.0.1:9") as nobody:
        began = time.monotonic()
        await SandboxSession(nobody, SessionReply(session_id="x", backend="", limits=session.limits)).close()
        assert time.monotonic() - began < 10


def test_importing_the_client_loads_no_server() -> None:
    code = (
        "import sys, sandbox.client; assert not {'fastapi', 'torch', 'uvicorn', 'numpy', 'agentrl'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
