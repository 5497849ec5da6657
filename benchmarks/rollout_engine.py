"""The scripted engine with vLLM's API, in a process: `python -m benchmarks.rollout_engine TOKENIZER SECONDS`.

It takes tokens, and messages as an OpenAI endpoint. Answers are precomputed, so that the process that plays is what a
benchmark measures. Weights never change.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter

import msgspec
from aiohttp import web

from agentrl.testing import call
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Message
from benchmarks.rollout_script import ANSWER, NUM_CALLS, THOUGHT, Latency, key_of
from benchmarks.rollout_server import answer

CONTROL = {"weight_version": "0", "is_paused": False, "data": [{"id": "policy"}], "results": [None]}


def application(tokenizer: TurnTokenizer, latency: Latency) -> web.Application:
    """Answers each turn of an episode at /inference/v1/generate and /v1/chat/completions, and all else alike."""
    chats = [msgspec.json.encode(answer(turn)) for turn in range(NUM_CALLS + 1)]
    answers, rng, asked = [_answer(tokenizer, turn) for turn in range(NUM_CALLS + 1)], random.Random(0), Counter[str]()

    async def generate(request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        episode = body["request_id"].partition("@")[0].rpartition("-")[0]
        turn, asked[episode] = asked[episode], asked[episode] + 1
        await asyncio.sleep(latency.draw(rng))
        prompt = msgspec.json.encode({"prompt_token_ids": body["token_ids"]})
        events = b"".join(b"data: " + event + b"\n\n" for event in (prompt, answers[turn], b"[DONE]"))
        return web.Response(body=events, content_type="text/event-stream")

    async def complete(request: web.Request) -> web.Response:
        history = msgspec.json.decode(await request.read())["messages"]
        turn = sum(message["role"] == "assistant" for message in history)
        await asyncio.sleep(latency.draw(rng))
        return web.Response(body=chats[turn], content_type="application/json")

    async def control(request: web.Request) -> web.Response:
        return web.json_response(CONTROL)

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_route("*", "/{path:.*}", control)
    return app


def _answer(tokenizer: TurnTokenizer, turn: int) -> bytes:
    """The event that has all tokens of a turn."""
    said = Message(role="assistant", content=ANSWER)
    if turn < NUM_CALLS:
        said = Message(role="assistant", content=THOUGHT, tool_calls=call("lookup", key=key_of(turn)).tool_calls)
    ids = list(tokenizer.turn(said))
    choice = {
        "token_ids": ids,
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in ids]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
    }
    return msgspec.json.encode({"choices": [choice]})


async def serve(tokenizer: str, median_s: float) -> None:
    """Serve until standard input closes. The first line of standard output is the port."""
    runner = web.AppRunner(application(TurnTokenizer.load(tokenizer), Latency(median_s=median_s)), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], float(sys.argv[2])))
