"""A cancelled run ends: no wait swallows the cancellation."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

from agentrl.engine.metered import MeteredEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training.learner_session import LearnerSession
from agentrl.types import Probe, WeightsRef
from tests.agentrl.training.whole_run import YesAndNo

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("num_turns", range(4))
async def test_weights_that_come_just_as_the_run_ends_do_not_make_it_go_on(
    tokenizer: TurnTokenizer, num_turns: int
) -> None:
    """`num_turns` of the event loop lie between the two."""
    session = LearnerSession(MeteredEngine(YesAndNo(tokenizer)))
    waiting = asyncio.create_task(session.weights(within_s=60))
    await asyncio.sleep(0.01)
    probe = Probe(token_ids=(1, 2), logprobs=(-1.0,))
    await session.weights_published(WeightsRef(policy_version=0, num_bytes=0, update_info={}, checksum="", probe=probe))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_nobody_uses_wait_for() -> None:
    """Up to Python 3.11 it returns a result that is there instead of the cancellation: use asyncio.timeout."""
    for package in ("agentrl", "trainer", "sandbox", "envs"):
        for path in (ROOT / package).rglob("*.py"):
            names = {
                ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
            }
            assert "asyncio.wait_for" not in names, path
