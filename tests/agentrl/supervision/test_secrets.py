"""Which callers need a token, where it comes from, and how a server answers a caller without one."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from agentrl.config import EngineConfig
from agentrl.engine import vllm_command
from agentrl.engine.vllm.auth_middleware import BearerAuthMiddleware
from agentrl.errors import ConfigError
from agentrl.supervision import secrets


def test_a_token_comes_from_the_variable_or_the_file_it_names(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from the file\n")
    named = {"AGENTRL_ENGINE_TOKEN_FILE": str(tmp_path / "token")}
    assert secrets.read(secrets.ENGINE, named) == "from the file"
    assert secrets.read(secrets.ENGINE, named | {"AGENTRL_ENGINE_TOKEN": "itself"}) == "itself"


def test_the_run_s_token_serves_where_no_other_is_set() -> None:
    assert secrets.read(secrets.SANDBOX, {"AGENTRL_TOKEN": "one for all"}) == "one for all"
    assert secrets.read(secrets.RUN, {"AGENTRL_SANDBOX_TOKEN": "the sandbox's"}) is None


@pytest.mark.parametrize(("content", "complaint"), [(None, "cannot read"), ("\n", "is empty")])
def test_a_file_without_a_token_is_named(tmp_path: Path, content: str | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match=f"AGENTRL_TOKEN_FILE.*{complaint}"):
        secrets.read(secrets.RUN, {"AGENTRL_TOKEN_FILE": str(tmp_path / "token")})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.3", "engine", ""])
def test_an_engine_that_others_reach_demands_a_token(host: str) -> None:
    settings = {"model_path": "m", "served_name": "policy", "port": 1, "config": EngineConfig()}
    settings |= {"host": host, "max_context": 64, "dtype": "float32", "seed": 0}
    with pytest.raises(ConfigError, match=r"engine\.host: .*set AGENTRL_ENGINE_TOKEN"):
        vllm_command.command(**settings)  # type: ignore[arg-type]
    argv, env = vllm_command.command(**settings, token="secret")  # type: ignore[arg-type]
    assert (
        "agentrl.engine.vllm.auth_middleware.BearerAuthMiddleware" in argv and "secret" not in argv
    )  # anyone may read a command line
    assert env["AGENTRL_ENGINE_TOKEN"] == "secret"


def test_loopback_needs_none() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        secrets.require(None, host=host, key="engine.host", name=secrets.ENGINE)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> httpx.AsyncClient:
    monkeypatch.setenv("AGENTRL_ENGINE_TOKEN", "secret")

    async def answer(_request: object) -> PlainTextResponse:
        return PlainTextResponse("passed")

    app = Starlette(routes=[Route(path, answer) for path in ("/health", "/pause", "/v1/models")])
    app.add_middleware(BearerAuthMiddleware)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")


@pytest.mark.parametrize("given", [None, "", "secret", "Bearer", "Bearer wrong", "Bearer secret2", "bearer secret"])
async def test_the_guard_refuses_whoever_does_not_show_the_token(guarded: httpx.AsyncClient, given: str | None) -> None:
    for path in ("/pause", "/v1/models", "/health/../pause", "/nothing"):
        answer = await guarded.get(path, headers={} if given is None else {"authorization": given})
        assert answer.status_code == 401 and "AGENTRL_ENGINE_TOKEN" in answer.text


async def test_the_guard_lets_in_who_does_and_everybody_to_ask_for_health(guarded: httpx.AsyncClient) -> None:
    assert (await guarded.get("/pause", headers={"authorization": "Bearer secret"})).text == "passed"
    assert (await guarded.get("/health")).text == "passed"


def test_there_is_no_guard_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGENTRL_ENGINE_TOKEN", "AGENTRL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="set AGENTRL_ENGINE_TOKEN"):
        BearerAuthMiddleware(Starlette())
