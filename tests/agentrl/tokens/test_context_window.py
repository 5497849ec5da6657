"""Long context: budgets, cuts, and forks whose segments hold the very tokens that the engine saw."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RolloutConfig
from agentrl.env import Env, Episode, ToolEnv
from agentrl.testing import ScriptedEngine, call
from agentrl.tokens.context_window import DROPPED, SUMMARY_HEADER, SUMMARY_REQUEST, ContextWindow
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.tools import tool
from agentrl.types import Completion, Message, Sampling, StopReason, Task, Trajectory, system, user
from tests.agentrl.rollouts.playing import play_one

TASK = Task(id="t", prompt="What is it?", answer="7")
LIMITS = RolloutConfig(max_context=1200, max_turn_tokens=100, tool_output_tokens=120)


class Library(ToolEnv):
    """Every page is long."""

    max_turns = 12

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [system("Read."), user(task.prompt)], {}

    @tool
    async def read(self, page: int) -> str:
        """Read a page."""
        return f"page {page}: " + "lorem " * 10

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(episode.final_text == episode.task.answer)}


def read(page: int) -> Message:
    return call("read", page=page)


def reader(num_pages: int) -> Callable[[str], Message | str]:
    """Reads a number of pages and answers; writes a note whenever it is asked to."""
    pages = iter(range(num_pages))

    def say(prompt: str) -> Message | str:
        if SUMMARY_REQUEST.strip() in prompt[-400:]:
            return "page 1 has it: 7"
        page = next(pages, None)
        return "7" if page is None else read(page)

    return say


async def play(engine: Any, tokenizer: TurnTokenizer, env: Env | None = None, **changes: Any) -> tuple[Trajectory, ...]:
    config = LIMITS.model_copy(update=changes)
    return await play_one(env or Library(), TASK, engine=engine, tokenizer=tokenizer, config=config)


@dataclass(kw_only=True)
class Witness:
    """Keeps what the engine saw and said."""

    engine: ScriptedEngine
    calls: list[tuple[list[int], Completion]] = field(default_factory=list)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        completion = await self.engine.generate(token_ids, sampling, request_id=request_id, session_id=session_id)
        self.calls.append((list(token_ids), completion))
        return completion


def turns_of(segments: Sequence[Trajectory]) -> list[tuple[list[int], Completion]]:
    """(tokens before, what was said) of every turn, as the learner will read them."""
    out = []
    for segment in segments:
        ids: list[int] = []
        for turn in segment.turns:
            ids += turn.observation_ids
            out.append((list(ids), turn.completion))
            ids += turn.completion.token_ids
    return out


@pytest.mark.parametrize("tool_format", ["hermes", "fences"])
async def test_dropping_old_observations_forks_and_every_turn_keeps_the_prompt_it_had(
    tokenizer: TurnTokenizer, tool_format: str
) -> None:
    turns = tokenizer.with_tool_format(tool_format)
    witness = Witness(engine=ScriptedEngine(tokenizer=turns, script=reader(8)))
    segments = await play(witness, tokenizer, compaction="drop", compact_at_tokens=500, tool_format=tool_format)

    assert turns_of(segments) == witness.calls
    assert [s.id for s in segments] == [f"e.{i}" for i in range(len(segments))] and len(segments) >= 2
    assert sum(s.weight for s in segments) == pytest.approx(1) and {s.reward for s in segments} == {1.0}
    prompt = tokenizer.decode(segments[1].turns[0].observation_ids)
    assert DROPPED in prompt and "page 0" not in prompt and "lorem" in prompt  # the newest page is still there


async def test_a_summary_is_an_action_of_the_old_segment_and_the_prompt_of_the_new(tokenizer: TurnTokenizer) -> None:
    witness = Witness(engine=ScriptedEngine(tokenizer=tokenizer, script=reader(3)))
    first, second = await play(witness, tokenizer, compaction="summarize", compact_at_tokens=500)

    assert turns_of([first, second]) == witness.calls
    assert tokenizer.assistant_text(first.turns[-1].completion.token_ids) == "page 1 has it: 7"
    assert SUMMARY_REQUEST in tokenizer.decode(first.turns[-1].observation_ids)
    prompt = tokenizer.decode(second.turns[0].observation_ids)
    assert f"What is it?{SUMMARY_HEADER}page 1 has it: 7" in prompt and "lorem" not in prompt
    assert (first.reward, second.reward, first.stop_reason) == (1.0, 1.0, StopReason.COMPLETED)
    assert first.info["turns"] == 5 and first.info["segments"] == 2


@pytest.mark.parametrize("compaction", ["drop", "summarize"])
async def test_ratios_of_every_segment_are_exact(tiny_model_dir: Path, compaction: str) -> None:
    """The learner's packed logprobs of each segment are those of the model on the tokens the engine saw: ratio 1."""
    import torch
    from transformers import AutoModelForCausalLM

    from trainer.gradient import attention
    from trainer.gradient.logprobs import score
    from trainer.packing import action_tensors, join

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    turns = TurnTokenizer.load(str(tiny_model_dir))
    engine = ModelEngine(tokenizer=turns, script=reader(4), model=model)
    segments = await play(engine, turns, compaction=compaction, compact_at_tokens=420)
    assert len(segments) >= 2

    tensors = [action_tensors(segment, torch.device("cpu")) for segment in segments]
    attention.install(model)
    ours = score(model, join(tensors)).logprob_N
    behavior = torch.cat([one.behavior_logprob_N for one in tensors])
    torch.testing.assert_close(ours.double(), behavior, rtol=0, atol=1e-5)


@dataclass(kw_only=True)
class ModelEngine(ScriptedEngine):
    """Says what the script says, with a real model's logprobs on the very prompt it was sent."""

    model: Any

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        import torch

        completion = await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)
        ids = torch.tensor([[*token_ids, *completion.token_ids]])
        with torch.no_grad():
            logprobs_TV = self.model(ids).logits[0, len(token_ids) - 1 : -1].log_softmax(-1)
        said = logprobs_TV.gather(1, ids[0, len(token_ids) :, None])[:, 0].tolist()
        return Completion(
            token_ids=completion.token_ids,
            behavior_logprobs=tuple(said),
            version_spans=completion.version_spans,
            finish_reason=completion.finish_reason,
        )


async def test_without_compaction_nothing_forks(tokenizer: TurnTokenizer) -> None:
    engine = ScriptedEngine(tokenizer=tokenizer, script=[read(page) for page in range(12)])
    (episode,) = await play(engine, tokenizer)
    assert (episode.id, episode.weight, episode.stop_reason) == ("e", 1.0, StopReason.MAX_CONTEXT)


async def test_old_output_is_dropped_by_and_by_and_not_every_turn(tokenizer: TurnTokenizer) -> None:
    engine = ScriptedEngine(tokenizer=tokenizer, script=reader(11))
    segments = await play(engine, tokenizer, compaction="drop", compact_at_tokens=500, max_context=4000)
    assert segments[0].reward == 1.0
    assert 2 <= len(segments) <= 4 and sum(len(segment.turns) for segment in segments) == 12


async def test_a_fork_that_would_leave_nothing_out_is_not_made(tokenizer: TurnTokenizer) -> None:
    engine = ScriptedEngine(tokenizer=tokenizer, script=[read(0), read(1), "7"])
    (episode,) = await play(engine, tokenizer, compaction="drop", tool_output_tokens=3, compact_at_tokens=300)
    assert (episode.id, episode.reward) == ("e", 1.0)


@pytest.mark.parametrize(
    ("keep", "begins", "ends"),
    [("both", "page 5", "lorem "), ("head", "page 5", "...]\n"), ("tail", "\n[...", "lorem ")],
)
async def test_the_kept_end_of_tool_output_is_the_one_asked_for(
    tokenizer: TurnTokenizer, keep: str, begins: str, ends: str
) -> None:
    engine = ScriptedEngine(tokenizer=tokenizer, script=[read(5), "7"])
    (episode,) = await play(engine, tokenizer, tool_output_keep=keep, tool_output_tokens=40)
    text = episode.messages[3].content
    assert text.startswith(begins) and text.endswith(ends) and tokenizer.count(text) <= 40


async def test_tool_output_is_cut_in_characters_where_asked(tokenizer: TurnTokenizer) -> None:
    for max_chars, wanted in ((None, "page 5: " + "lorem " * 10), (6, "page 5\n[... cut ...]\n")):
        engine = ScriptedEngine(tokenizer=tokenizer, script=[read(5), "7"])
        (episode,) = await play(engine, tokenizer, tool_output_chars=max_chars, tool_output_keep="head")
        assert episode.messages[3].content == wanted


def test_a_prompt_that_does_not_extend_the_record_is_never_sent(tokenizer: TurnTokenizer) -> None:
    window, engine = ContextWindow(tokenizer, LIMITS, ()), ScriptedEngine(tokenizer=tokenizer, script=["a"])
    window.open([user("q")])
    window.record(engine.completion("a"), Message(role="assistant", content="a"))
    window.observe([user("more")])
    window.prompt()
    window.segment.token_ids[-1] += 1
    with pytest.raises(AssertionError, match="does not extend"):
        window.prompt()


def episode_of(tokenizer: TurnTokenizer, num_turns: int, *, turn_tokens: int = 40) -> tuple[float, Trajectory]:
    """CPU seconds of the token path alone for an episode of that many turns, and its record."""
    limits = RolloutConfig(max_context=10**9, max_turn_tokens=512, tool_output_tokens=256)
    window, engine = ContextWindow(tokenizer, limits, ()), ScriptedEngine(tokenizer=tokenizer, script=[])
    completion = engine.completion("ab" * (turn_tokens // 2))
    answer = [Message(role="tool", content="0123456789 " * 8)]
    started = time.process_time()
    window.open([system("s"), user("q")])
    for _ in range(num_turns):
        prompt = window.prompt()
        window.record(completion, Message(role="assistant", content=""))
        window.observe(answer)
    spent_s = time.process_time() - started
    (segment,) = window.segments
    assert prompt == segment.token_ids[: len(prompt)]
    blank = {"reward": 0.0, "rewards": {}, "stop_reason": StopReason.COMPLETED, "messages": ()}
    return spent_s, Trajectory(id="e", task_id="t", turns=tuple(segment.turns), **blank)  # type: ignore[arg-type]


async def test_an_episode_of_32k_tokens_is_played_and_recorded_whole(tokenizer: TurnTokenizer) -> None:
    witness = Witness(engine=ScriptedEngine(tokenizer=tokenizer, script=[*map(read, range(290)), "7"]))
    limits: dict[str, Any] = {"max_context": 36_000, "tool_output_tokens": 200}
    env = Library()
    env.max_turns = 300  # type: ignore[misc]
    (episode,) = await play(witness, tokenizer, env, **limits)
    ids, mask = episode.token_ids(), episode.action_mask()
    assert 32_768 <= len(ids) <= 36_000 and len(ids) == len(mask) == len(episode.behavior_logprobs())
    assert turns_of([episode]) == witness.calls
    assert sum(mask) == episode.num_action_tokens


def test_work_per_turn_does_not_grow_with_the_episode(tokenizer: TurnTokenizer) -> None:
    """A turn costs a copy of the prompt, which the engine is sent whole; nothing is encoded or compared twice."""
    episode_of(tokenizer, 20)
    short_s = min(episode_of(tokenizer, 30)[0] for _ in range(3)) / 30
    long_s = min(episode_of(tokenizer, 300)[0] for _ in range(3)) / 300
    assert long_s < 4 * short_s + 0.5e-3
