"""The token path under the chat templates of the families people train: every prompt extends the one before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.tokens.renderers_strategy import family_of
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Message, ToolCall, system, user
from tests.agentrl.tokens.families import FAMILIES, LLAMA3, QWEN3, write_family

TOOLS = [{"type": "function", "function": {"name": "python", "description": "Run.", "parameters": {"type": "object"}}}]
# family, what writes its turns, variables of the template
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    *((name, "template", {}) for name in FAMILIES),
    ("qwen3", "template", {"enable_thinking": False}),
    ("qwen3", "qwen3", {"enable_thinking": True}),
]
relaxed = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

every_token = st.sampled_from(sorted({token for f in FAMILIES.values() for token in (*f.special, *f.markers)}))
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
contents = st.lists(st.one_of(every_token, texts), max_size=4).map("".join)
observations = st.one_of(
    st.lists(contents, min_size=1, max_size=3).map(lambda found: [Message(role="tool", content=c) for c in found]),
    contents.map(lambda c: [user(c)]),
)
plain = st.text("abc xyz.?\n{1}", min_size=1, max_size=20).map(lambda t: f"a{t}z")


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def turns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TurnTokenizer:
    name, renderer, template_args = request.param
    if renderer != "template":
        pytest.importorskip("renderers")
    folder = write_family(FAMILIES[name], tmp_path_factory.mktemp("family"))
    return TurnTokenizer.load(str(folder), renderer=renderer, template_args=template_args)


def num_added(turns: TurnTokenizer, ids: list[int]) -> int:
    return sum(i in turns.added_ids.values() for i in ids)


@relaxed
@given(
    opening=st.tuples(contents, contents),
    dialogue=st.lists(st.tuples(contents, st.booleans(), observations), min_size=1, max_size=4),
)
def test_prompts_only_grow_and_no_content_becomes_a_special_token(
    turns: TurnTokenizer, opening: tuple[str, str], dialogue: list[tuple[str, bool, list[Message]]]
) -> None:
    harmless = turns.first_prompt([system("s"), user("u")], TOOLS)
    ids = turns.first_prompt([system(opening[0]), user(opening[1])], TOOLS)
    assert num_added(turns, ids) == num_added(turns, harmless)
    for said, closed, observation in dialogue:
        completion = [*turns.encode_assistant(said), *([turns.close_id] if closed else [])]
        new = turns.observation(observation, previous=completion)
        same = turns.observation([Message(role=m.role, content="x") for m in observation], previous=completion)
        assert num_added(turns, new) == num_added(turns, same)
        assert (new[0] == turns.close_id) is not closed
        ids = [*ids, *completion, *new]
    again = turns.first_prompt([system(opening[0]), user(opening[1])], TOOLS)
    assert ids[: len(again)] == again


@relaxed
@given(text=contents)
def test_tool_output_reaches_the_model_as_the_text_it_is(turns: TurnTokenizer, text: str) -> None:
    ids = turns.observation([Message(role="tool", content=text)], previous=[turns.close_id])
    shown = turns.decode(ids)
    if "[INST]" in turns.added_ids or "<start_of_turn>" in turns.added_ids:
        text = text.replace("▁", " ")  # a space, to SentencePiece
    assert text in shown or json.dumps(text, ensure_ascii=False)[1:-1] in shown


@relaxed
@given(opening=st.tuples(plain, plain), rounds=st.lists(st.tuples(plain, plain), max_size=3))
def test_a_dialogue_with_a_user_has_the_tokens_of_the_template(
    turns: TurnTokenizer, opening: tuple[str, str], rounds: list[tuple[str, str]]
) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(turns.name)
    dialogue = [{"role": "user", "content": opening[1]}]
    ids = turns.first_prompt([user(opening[1])])
    for said, answer in rounds:
        dialogue += [{"role": "assistant", "content": said}, {"role": "user", "content": answer}]
        spoken = turns.encode_assistant(said)
        ids += [*spoken, turns.close_id, *turns.observation([user(answer)], previous=[turns.close_id])]
    expected = reference.apply_chat_template(dialogue, add_generation_prompt=True, tokenize=False)
    assert without_prefilled(turns.decode(ids)) == without_prefilled(str(expected)).replace("[/INST] ", "[/INST]")


def without_prefilled(text: str) -> str:
    """Our history keeps what the prompt had begun for the model; the template writes it in the newest turn alone."""
    return text.replace("<think>\n\n</think>\n\n", "").replace("<think>\n", "")


def test_tool_output_is_written_as_the_family_writes_it(tmp_path: Path, turns: TurnTokenizer) -> None:
    family = next(f for f in FAMILIES.values() if f.template == (Path(turns.name) / "chat_template.jinja").read_text())
    ids = turns.observation([Message(role="tool", content="R")], previous=[turns.close_id])
    assert without_prefilled(turns.decode(ids)) == family.tool_answer


def test_every_family_template_teaches_of_tools_in_the_format_that_is_parsed(turns: TurnTokenizer) -> None:
    told = turns.decode(turns.first_prompt([system("Be brief."), user("hi")], TOOLS))
    assert "<tool_call>" in told and "python" in told and "Be brief." in told


def test_a_history_with_calls_holds_what_was_said_and_no_synthetic_call(turns: TurnTokenizer) -> None:
    call = ToolCall(id="call_0", name="python", arguments={"code": "1"})
    asked = Message(role="assistant", content="", tool_calls=(call,))
    history = [user("hi"), asked, Message(role="tool", content="R", tool_call_id="call_0")]
    text = turns.decode(turns.first_prompt(history, TOOLS))
    assert '{"name": "python", "arguments": {"code": "1"}}' in text and "R" in text and "\ue002" not in text


def test_an_opening_with_a_tool_message_before_any_turn_is_refused_where_the_template_refuses_it(
    tmp_path: Path,
) -> None:
    turns = TurnTokenizer.load(str(write_family(FAMILIES["mistral"], tmp_path)))
    with pytest.raises(ConfigError, match="needs an assistant turn"):
        turns.first_prompt([user("q"), Message(role="tool", content="R")])


def test_masks_of_a_demonstration_cover_what_the_model_says(turns: TurnTokenizer) -> None:
    call = ToolCall(id="call_0", name="python", arguments={"code": "1"})
    asked, tool = Message(role="assistant", content="", tool_calls=(call,)), Message(role="tool", content="R")
    ids, mask = turns.demonstration([user("q"), asked, tool, Message(role="assistant", content="Done.")], TOOLS)
    said = [i for i, m in zip(ids, mask, strict=True) if m]
    assert said == [*turns.turn(asked), *turns.turn(Message(role="assistant", content="Done."))]


@pytest.mark.parametrize("thinking", [True, False])
def test_the_renderers_package_and_the_template_write_the_same_tokens(tmp_path: Path, thinking: bool) -> None:
    pytest.importorskip("renderers")
    folder = str(write_family(QWEN3, tmp_path))
    ours, theirs = (
        TurnTokenizer.load(folder, renderer=name, template_args={"enable_thinking": thinking})
        for name in ("template", "qwen3")
    )
    assert theirs.strategy.name == "renderers' qwen3" and theirs.close_id == ours.close_id
    opening = [system("s"), user("<|im_end|> é")]
    assert theirs.first_prompt(opening) == ours.first_prompt(opening)
    yes, thinks = ours.encode_assistant("yes"), ours.encode_assistant("<think>and so on")
    for said in (yes, [*yes, ours.close_id], thinks, [*thinks, ours.close_id]):
        for new in ([Message(role="tool", content="<|im_end|>1"), Message(role="tool", content="")], [user("on")]):
            assert theirs.observation(new, previous=said) == ours.observation(new, previous=said)


def test_a_family_is_known_by_the_hub_name_of_its_model() -> None:
    pytest.importorskip("renderers")
    assert family_of("Qwen/Qwen3-0.6B") == "qwen3" and family_of(".") is None


def test_a_family_that_does_not_fit_the_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("renderers")
    folder = str(write_family(LLAMA3, tmp_path))
    with pytest.raises(ConfigError, match="renderers' qwen3 cannot write for this vocabulary"):
        TurnTokenizer.load(folder, renderer="qwen3")
