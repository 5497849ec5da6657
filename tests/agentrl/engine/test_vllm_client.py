"""How the engine clients report servers that are gone, broken or slow, or that answer nonsense."""

import asyncio
import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.engine.weight_updates import UpdateSettings
from agentrl.errors import EngineError, EngineGone, WeightSyncError
from agentrl.supervision.serving import free_port
from agentrl.types import FinishReason, Probe, Sampling, WeightsRef

PROMPT = [5, 6, 7]
SAMPLING = Sampling(max_tokens=2)
REF = WeightsRef(
    policy_version=1,
    num_bytes=0,
    update_info={"path": "/nowhere"},
    checksum="",
    probe=Probe(token_ids=(5, 6), logprobs=(-1.0,)),
)
GOOD: list[dict[str, Any]] = [
    {
        "prompt_token_ids": [5, 6, 7],
        "choices": [{"token_ids": [8], "logprobs": {"content": [{"token_id": 8, "logprob": -0.5}]}}],
    },
    {
        "choices": [
            {
                "token_ids": [9],
                "finish_reason": "length",
                "logprobs": {"content": [{"token_id": 9, "logprob": -1.5}]},
                "weight_versions": [{"version": "0", "start": 0, "end": 2}],
            }
        ]
    },
]


def events(chunks: list[dict[str, Any]], *, end: bytes = b"data: [DONE]\n\n") -> Response:
    """Server-sent events, as vLLM writes them."""
    body = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
    return Response(body + end, media_type="text/event-stream")


class Script:
    """A local server in the shape of vLLM whose answers a test sets."""

    def __init__(self) -> None:
        self.generate: Callable[[], Any] = lambda: GOOD
        self.label, self.paused, self.delay_s = "0", False, 0.0
        self.seen: list[tuple[str, Any]] = []
        self.url = ""
        self.results: list[str] = []
        self.special: Callable[[str], Any] = lambda path: None
        self.health: list[int] = []

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.api_route("/{path:path}", methods=["GET", "POST"])
        async def answer(path: str, request: Request) -> Response:
            body = await request.body()
            self.seen.append((path, await request.json() if body else None))
            await asyncio.sleep(self.delay_s)
            if (special := self.special(path)) is not None:
                reply = special
            elif path in ("inference/v1/generate", "v1/completions"):
                reply = self.generate()
                reply = events(reply) if isinstance(reply, list) else reply
            elif path == "update_weight_version":
                reply, self.label = {}, self.seen[-1][1]["new_version"]
            else:
                reply = {"weight_version": self.label, "is_paused": self.paused, "data": [{"id": "policy"}]}
                reply |= {"results": self.results}
            return reply if isinstance(reply, Response) else JSONResponse(reply)

        return app


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    port = free_port()
    script.url = f"http://127.0.0.1:{port}"
    server = uvicorn.Server(uvicorn.Config(script.app(), host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield script
    server.should_exit = server.force_exit = True
    thread.join(timeout=10)


def asked(script: Script) -> list[dict[str, Any]]:
    """Bodies of the generations so far."""
    return [body for path, body in script.seen if path == "inference/v1/generate"]


def altered(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> list[dict[str, Any]]:
    """`change` is given the first event and the last one's choice."""
    reply = copy.deepcopy(GOOD)
    change(reply[0], reply[1]["choices"][0])
    return reply


async def generate(script: Script, **settings: Any) -> Any:
    async with VLLMEngine(script.url, **settings) as engine:
        return await engine.generate(PROMPT, SAMPLING, request_id="r")


async def test_a_good_answer_becomes_a_completion(script: Script) -> None:
    completion = await generate(script)
    assert completion.token_ids == (8, 9)
    assert completion.behavior_logprobs == (-0.5, -1.5)
    assert list(completion.policy_versions()) == [0, 0]
    assert completion.finish_reason is FinishReason.LENGTH


async def test_tokens_are_heard_of_as_they_come(script: Script) -> None:
    heard: list[float] = []
    await generate(script, on_tokens=lambda: heard.append(time.monotonic()))
    assert len(heard) == sum(len(event["choices"]) for event in GOOD)


async def test_each_version_has_its_cache_salt(script: Script) -> None:
    script.label = "4"
    await generate(script)
    _, body = script.seen[-1]
    assert "seed" not in body["sampling_params"]
    assert body["cache_salt"] == "v4"


async def test_a_seed_is_sent_only_to_a_server_that_takes_it(script: Script) -> None:
    seeded = replace(SAMPLING, seed=2**63 - 1)
    async with VLLMEngine(script.url) as engine:
        with pytest.raises(EngineError, match=r"engine\.request_seeds=false"):
            await engine.generate(PROMPT, seeded, request_id="r")
        assert asked(script) == []
        script.results = ["yes"]
        await engine.generate(PROMPT, seeded, request_id="r")
    assert [body["sampling_params"]["seed"] for body in asked(script)] == [2**63 - 1]


async def test_an_answer_with_a_seed_that_breaks_off_is_begun_anew(script: Script) -> None:
    script.results = ["yes"]
    replies = iter([events(GOOD[:1], end=b""), JSONResponse({}, status_code=503), GOOD])
    script.generate = lambda: next(replies)
    async with VLLMEngine(script.url, updates=UpdateSettings(return_timeout_s=5)) as engine:
        completion = await engine.generate(PROMPT, replace(SAMPLING, seed=3), request_id="r")
    assert completion.token_ids == (8, 9)
    assert {(tuple(body["token_ids"]), body["sampling_params"]["max_tokens"]) for body in asked(script)} == {
        (tuple(PROMPT), 2)
    }


BAD: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "no spans": lambda first, last: last.pop("weight_versions"),
    "null spans": lambda first, last: last.update(weight_versions=None),
    "short spans": lambda first, last: last["weight_versions"][0].update(end=1),
    "a gap between spans": lambda first, last: last["weight_versions"][0].update(start=1),
    "a label that is no version": lambda first, last: last["weight_versions"][0].update(version="mine"),
    "no logprobs": lambda first, last: last.update(logprobs=None),
    "a logprob too few": lambda first, last: last["logprobs"]["content"].pop(),
    "a logprob of another token": lambda first, last: last["logprobs"]["content"][0].update(token_id=1),
    "a positive logprob": lambda first, last: last["logprobs"]["content"][0].update(logprob=0.1),
    "a placeholder for NaN": lambda first, last: last["logprobs"]["content"][0].update(logprob=-9999.0),
    "token ids as text": lambda first, last: last.update(token_ids=["9"]),
    "an unknown finish reason": lambda first, last: last.update(finish_reason="tired"),
    "tokens after the end": lambda first, last: first["choices"][0].update(finish_reason="stop"),
    "no end": lambda first, last: last.pop("finish_reason"),
    "another prompt": lambda first, last: first.update(prompt_token_ids=[5, 6, 8]),
    "a cut prompt": lambda first, last: first.update(prompt_token_ids=[5, 6]),
    "no prompt": lambda first, last: first.pop("prompt_token_ids"),
    "no choice": lambda first, last: first.update(choices=[]),
    "two choices": lambda first, last: first["choices"].append(first["choices"][0]),
    "a failure in the middle": lambda first, last: first.update(error={"message": "out of luck"}),
}


@pytest.mark.parametrize("name", BAD)
async def test_an_answer_that_cannot_be_true_is_an_engine_error(script: Script, name: str) -> None:
    script.generate = lambda: altered(BAD[name])
    with pytest.raises(EngineError, match=script.url):
        await generate(script)


@pytest.mark.parametrize(
    ("status", "fix"), [(403, "--enable-scale-out"), (404, "VLLM_SERVER_DEV_MODE=1"), (500, "the engine's log")]
)
async def test_a_refusal_carries_the_reason_and_how_to_fix_it(script: Script, status: int, fix: str) -> None:
    script.generate = lambda: JSONResponse({"error": {"message": "not today"}}, status_code=status)
    with pytest.raises(EngineError, match=f"{status}: not today; .*{fix}"):
        await generate(script)


async def test_a_stream_that_breaks_off_is_an_engine_that_is_gone(script: Script) -> None:
    script.generate = lambda: events([{"prompt_token_ids": PROMPT}], end=b"")
    with pytest.raises(EngineGone, match="ended before its last token"):
        await generate(script)
    assert len(asked(script)) == 6


async def test_a_stream_that_breaks_off_is_continued_where_the_engine_is_back(script: Script) -> None:
    rest = altered(lambda first, last: last["weight_versions"][0].update(end=1))[1:]
    rest[0]["prompt_token_ids"] = [5, 6, 7, 8]
    answers: list[Any] = [events(GOOD[:1], end=b""), rest]
    script.generate = lambda: answers.pop(0)
    completion = await generate(script, updates=UpdateSettings(return_timeout_s=5))
    assert completion.token_ids == (8, 9)
    assert completion.behavior_logprobs == (-0.5, -1.5)
    assert list(completion.policy_versions()) == [0, 0]
    assert [body["token_ids"] for body in asked(script)] == [[5, 6, 7], [5, 6, 7, 8]]
    assert [body["sampling_params"]["max_tokens"] for body in asked(script)] == [2, 1]


async def test_a_server_that_forgot_its_version_was_restarted_and_gets_it_again(script: Script) -> None:
    fresh = altered(lambda first, last: last["weight_versions"][0].update(version="default"))

    def answer() -> list[dict[str, Any]]:
        return GOOD if len(asked(script)) > 1 else fresh

    script.generate = answer
    async with VLLMEngine(script.url, updates=UpdateSettings(return_timeout_s=5)) as engine:
        script.label = "default"
        completion = await engine.generate(PROMPT, SAMPLING, request_id="r")
    assert list(completion.policy_versions()) == [0, 0]
    assert [body["token_ids"] for body in asked(script)] == [PROMPT, PROMPT]
    assert script.label == "0"


async def test_raw_logprobs_are_found_out_where_they_would_be_wrong(script: Script) -> None:
    def answer() -> Any:
        body = script.seen[-1][1]
        if "prompt_logprobs" in body["sampling_params"]:
            entries = [None, *({str(token): {"logprob": -0.5}} for token in body["token_ids"][1:])]
            return {"usage": {"prompt_tokens": len(body["token_ids"])}, "prompt_logprobs": entries}
        reply = altered(lambda first, last: last["logprobs"]["content"][0].update(logprob=-0.5))
        reply[0]["prompt_token_ids"] = body["token_ids"]
        return reply

    script.generate = answer
    hot = Sampling(max_tokens=2, temperature=0.7, top_k=20)
    async with VLLMEngine(script.url) as engine:
        with pytest.raises(EngineError, match=r"temperature=0\.7.*top_k=20.*--logprobs-mode processed_logprobs"):
            await engine.generate(PROMPT, hot, request_id="r")
        await engine.generate(PROMPT, SAMPLING, request_id="s")  # nothing is modified: every mode is right


async def test_an_html_answer_is_an_engine_error(script: Script) -> None:
    script.generate = lambda: Response("<html>proxy</html>", media_type="text/html")
    with pytest.raises(EngineError, match="does not understand"):
        await generate(script)


async def test_paused_is_retried_until_it_is_over(script: Script) -> None:
    answers: list[Any] = [Response(status_code=503), Response(status_code=503), GOOD]
    script.generate = lambda: answers.pop(0)
    assert (await generate(script)).token_ids == (8, 9)


async def test_paused_for_ever_ends_at_the_deadline(script: Script) -> None:
    script.generate = lambda: Response(status_code=503)
    with pytest.raises(EngineError, match=r"not answered within 0\.5 s"):
        await generate(script, request_timeout_s=0.5)


async def test_a_server_that_does_not_answer_ends_at_the_deadline(script: Script) -> None:
    script.delay_s = 30
    with pytest.raises(EngineError, match=r"not answered within 0\.3 s"):
        await generate(script, request_timeout_s=0.3)


async def test_nothing_listening_names_the_url() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=f"{url}.*nothing listens there"):
        async with VLLMEngine(url):
            pass


async def test_a_server_that_dies_in_mid_answer_is_an_engine_error() -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{")
        writer.close()

    server = await asyncio.start_server(die, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(EngineError, match=f"127.0.0.1:{port}.*connection broke"):
            async with VLLMEngine(f"http://127.0.0.1:{port}", model="policy"):
                pass


async def test_start_up_weights_become_version_0(script: Script) -> None:
    script.label = "default"
    async with VLLMEngine(script.url) as engine:
        assert await engine.version() == 0


async def test_a_foreign_label_is_refused_on_entering(script: Script) -> None:
    script.label = "my-weights"
    with pytest.raises(EngineError, match="'my-weights' is not a policy version"):
        await generate(script)


async def test_an_engine_left_paused_is_refused_on_entering(script: Script) -> None:
    script.paused = True
    with pytest.raises(EngineError, match=r"is paused.*restart it"):
        await generate(script)


async def test_an_update_held_up_by_a_server_whose_engine_died_is_made_once_it_is_back(script: Script) -> None:
    def dies_and_comes_back(path: str) -> Any:
        if path == "pause" and not script.health:
            script.health = [503, 503, 200, 200, 200]
            return JSONResponse({"error": {"message": "held up"}}, status_code=500)
        if path == "health" and script.health:
            return Response(status_code=script.health.pop(0) if len(script.health) > 1 else 200)
        if path == "finish_weight_update":
            script.label = script.seen[-1][1]["weight_version"]
        return None

    script.health, script.special = [], dies_and_comes_back
    script.generate = lambda: {"usage": {"prompt_tokens": 2}, "prompt_logprobs": [None, {"6": {"logprob": -1.0}}]}
    async with VLLMEngine(script.url, updates=UpdateSettings(return_timeout_s=5)) as engine:
        await engine.update_weights(REF)
        assert await engine.version() == 1
    assert [path for path, _ in script.seen].count("pause") == 2


async def test_an_engine_that_reports_another_version_is_a_sync_error_and_trusted_no_more(script: Script) -> None:
    async with VLLMEngine(script.url) as engine:
        with pytest.raises(WeightSyncError, match="reports version 0"):
            await engine.update_weights(REF)
        assert "resume" not in [path for path, _ in script.seen]
        with pytest.raises(WeightSyncError, match="reports version 0"):
            await engine.generate(PROMPT, SAMPLING, request_id="r")
