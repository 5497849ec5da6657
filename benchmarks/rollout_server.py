"""The scripted engine as an OpenAI endpoint, in a process of its own: `python -m benchmarks.rollout_server SECONDS`."""

from __future__ import annotations

import asyncio
import json
import random
import sys

from aiohttp import web

from benchmarks.rollout_script import ANSWER, NUM_CALLS, THOUGHT, TOOL_NAME, Latency, key_of


def application(latency: Latency) -> web.Application:
    """Answers POST /v1/chat/completions according to the number of turns in the history."""
    rng = random.Random(0)

    async def complete(request: web.Request) -> web.Response:
        history = (await request.json())["messages"]
        turn = sum(message["role"] == "assistant" for message in history)
        await asyncio.sleep(latency.draw(rng))
        return web.json_response(answer(turn))

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", complete)
    return app


def answer(turn: int) -> dict[str, object]:
    """One chat completion."""
    message: dict[str, object] = {"role": "assistant", "content": ANSWER}
    if turn < NUM_CALLS:
        function = {"name": TOOL_NAME, "arguments": json.dumps({"key": key_of(turn)})}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        message = {"role": "assistant", "content": THOUGHT, "tool_calls": [call]}
    return {
        "id": f"turn-{turn}",
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if turn < NUM_CALLS else "stop"}],
        "usage": {"prompt_tokens": 300 * (turn + 1), "completion_tokens": 100, "total_tokens": 400},
    }


async def serve(median_s: float) -> None:
    """Serve until standard input closes. The first line of standard output is the port."""
    runner = web.AppRunner(application(Latency(median_s=median_s)), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
