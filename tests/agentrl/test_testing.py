from functools import partial

import pytest

from agentrl.errors import EngineError
from agentrl.testing import ScriptedEngine, call
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import FinishReason, Sampling, user


async def test_the_script_is_said_turn_by_turn_and_ends(tokenizer: TurnTokenizer) -> None:
    engine = ScriptedEngine(tokenizer=tokenizer, script=[call("python", code="1"), "done"], logprob=-0.25)
    prompt = tokenizer.first_prompt([user("hi")])
    ask = partial(engine.generate, prompt, Sampling(max_tokens=500), session_id="e-0")
    first, second = [await ask(request_id=f"e-0-{n}") for n in (0, 1)]
    assert '{"name": "python", "arguments": {"code": "1"}}' in tokenizer.assistant_text(first.token_ids)
    assert tokenizer.assistant_text(second.token_ids) == "done"
    assert set(second.behavior_logprobs) == {-0.25}
    with pytest.raises(EngineError, match="turn 3 was asked for"):
        await ask(request_id="e-0-2")
    assert await ask(request_id="e-0-1") == second
    again = await engine.generate(prompt, Sampling(max_tokens=500), request_id="f-0-0", session_id="f-0")
    assert again == first


async def test_answers_are_cut_at_max_tokens(tokenizer: TurnTokenizer) -> None:
    engine = ScriptedEngine(tokenizer=tokenizer, script=lambda prompt: prompt)
    prompt = tokenizer.first_prompt([user("hello")])
    completion = await engine.generate(prompt, Sampling(max_tokens=3), request_id="e-0-0")
    assert (len(completion.token_ids), completion.finish_reason) == (3, FinishReason.LENGTH)
    assert engine.prompts == {"e-0-0": prompt}
