"""A server with vLLM's API and a scripted engine, which fails as a test asks.

What it *holds* and what it *says* that it holds are two things here, as they are in a real server whose weight update
was cut off in the middle.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from agentrl.testing import ScriptedEngine
from agentrl.types import Sampling

Chunks = list[dict[str, Any]]
LOST = -1
"""What it holds where the contents of its memory are undefined."""


class VLLMDouble:
    """One server."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.url = ""
        self.spoil: Callable[[Chunks], object] = lambda chunks: None
        """Changes an answer before it is sent."""
        self.delay_s = 0.0
        self.refuses: Callable[[str], bool] = lambda path: False
        """Routes that answer 500, after they have done their work."""
        self.asked: Counter[str] = Counter()
        """How often each route was asked."""
        self.calls: list[str] = []
        """The routes that change something, in the order in which they were asked."""
        self.asleep: set[str] = set()
        """What it has released. Weights are lost with it."""
        self.enables_sleep = True
        self.stop: Callable[[], Awaitable[None]]
        """From then on nothing listens there."""
        self.token = ""
        """Asked of everybody, where there is one."""
        self.skew = 0.0
        """Added to what it scores: it computes something else than the learner does."""
        self.held = self.label = 0
        self.lies: list[str] = []
        """Answers that name other weights than those that made them."""
        self._runs = asyncio.Event()
        self._runs.set()

    def restart(self) -> None:
        """It comes back with the weights it was started with, and awake."""
        self.asleep, self.held, self.label = set(), 0, 0
        self._runs.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Any route."""
        path, text = request.path.strip("/"), await request.text()
        body = json.loads(text) if text else {}
        self.asked[path] += 1
        if request.method == "POST":
            self.calls.append(path if path != "wake_up" else f"wake_up {request.query['tags']}")
        if self.token and path != "health" and request.headers.get("authorization") != f"Bearer {self.token}":
            return web.json_response({"error": {"message": "who are you?"}}, status=401)
        if path == "inference/v1/generate":
            if "prompt_logprobs" in body["sampling_params"]:
                return web.json_response(_scored(body["token_ids"], -1.0 - self.held + self.skew))
            return await self._generate(body)
        reply = self._control(path, body, request.query)
        if self.refuses(path):
            return web.json_response({"error": {"message": "out of luck"}}, status=500)
        return web.json_response(reply)

    def _control(self, path: str, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        match path:
            case "sleep":
                assert query["mode"] == "keep" and query["level"] == "2"
                self._runs.clear()
                self.asleep, self.held = {"weights", "kv_cache"}, LOST
            case "wake_up":
                self.asleep -= {query["tags"]}
                if not self.asleep:
                    self._runs.set()
                return {"status": "sleeping" if self.asleep else "awake"}
            case "pause":
                self._runs.clear()
            case "resume":
                self._runs.set()
            case "update_weights":
                assert "weights" not in self.asleep, "there is no memory to write to"
                self.held = body["update_info"].get("version", self.held)
            case "finish_weight_update":
                self.label = int(body["weight_version"])
            case "update_weight_version":
                self.label = int(body["new_version"])
            case "collective_rpc" if body["method"] == "weights_checksum":
                return {"results": [f"weights {self.held}"]}
            case "collective_rpc" if body["method"] == "can_sleep":
                return {"results": ["yes" if self.enables_sleep else "no"]}
            case "collective_rpc" if body["method"] == "takes_seeds":
                return {"results": ["yes"]}
        return {
            "weight_version": str(self.label),
            "is_paused": not self._runs.is_set(),
            "data": [{"id": "policy"}],
            "results": [None],
        }

    async def _generate(self, body: dict[str, Any]) -> web.StreamResponse:
        await self._runs.wait()
        await asyncio.sleep(self.delay_s)
        await self._runs.wait()
        if self.held != self.label:
            self.lies.append(body["request_id"])
        wanted, ids = body["sampling_params"], body["token_ids"]
        sampling = Sampling(max_tokens=wanted["max_tokens"], seed=wanted.get("seed"))
        name = body["request_id"].partition("~")[0]  # SESSION-NUMBER~BREAKS
        said = await self.engine.generate(ids, sampling, request_id=name, session_id=name.rpartition("-")[0])
        scored = [
            {"token_id": token, "logprob": logprob}
            for token, logprob in zip(said.token_ids, said.behavior_logprobs, strict=True)
        ]
        last = {
            "token_ids": list(said.token_ids),
            "logprobs": {"content": scored},
            "finish_reason": str(said.finish_reason),
            "weight_versions": [{"version": str(self.label), "start": 0, "end": len(said.token_ids)}],
        }
        chunks: Chunks = [{"prompt_token_ids": ids}, {"choices": [last]}]
        self.spoil(chunks)
        lines = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
        return web.Response(body=lines + b"data: [DONE]\n\n", content_type="text/event-stream")


def _scored(token_ids: list[int], logprob: float) -> dict[str, Any]:
    return {
        "usage": {"prompt_tokens": len(token_ids)},
        "prompt_logprobs": [None, *({str(token): {"logprob": logprob}} for token in token_ids[1:])],
    }


@asynccontextmanager
async def vllm_double(engine: ScriptedEngine) -> AsyncIterator[VLLMDouble]:
    """Served on a free port for the length of the block."""
    double = VLLMDouble(engine)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", double.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    double.stop = runner.cleanup
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        double.url = f"http://{host}:{port}"
        yield double
    finally:
        await runner.cleanup()
