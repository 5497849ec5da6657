"""The rollout benchmark plays whole episodes in both of its own arms, and reports what it measured."""

from __future__ import annotations

import asyncio

from aiohttp.test_utils import TestServer

from benchmarks import rollout
from benchmarks.rollout_script import NUM_TURNS, Latency
from benchmarks.rollout_server import application


async def test_both_arms_play_every_episode_to_its_end() -> None:
    async with TestServer(application(Latency(median_s=0.01))) as server:
        url = str(server.make_url("/v1"))
        by_token, by_chat = await asyncio.gather(rollout.token_arm(8, 0.01), rollout.chat_arm(8, url))
    for found in (by_token, by_chat):
        assert (found["episodes"], found["turns"], found["reward"]) == (8, 8 * NUM_TURNS, 1.0)
        assert found["cpu_ms_a_turn"] > 0
    assert 500 < by_token["tokens_an_episode"] < 2000


def test_the_report_says_whether_the_goal_was_met() -> None:
    numbers = dict.fromkeys(("episodes", "turns", "wall_s", "kb_an_episode", "late_p50_ms", "late_p99_ms"), 7.0)
    row = ("agentrl, token path", numbers | {"cpu_ms_a_turn": 0.5, "tokens_an_episode": 900.0})
    text = rollout.report([row], "# T\n", "none")
    assert "0.50 ms, met" in text and "| agentrl, token path | 7 | 7 | 0.50 | 7 | 7 | 7.0 / 7 |" in text
