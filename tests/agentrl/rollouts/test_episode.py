import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.config import RolloutConfig
from agentrl.env import Env, Episode, Split, ToolEnv
from agentrl.errors import ConfigError, EngineError, EnvError, InfraError, SandboxError, WeightSyncError
from agentrl.testing import Script, ScriptedEngine, call
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.tools import tool
from agentrl.types import Completion, FinishReason, Message, Sampling, StopReason, Task, Trajectory, WeightsRef, user
from sandbox.client import SandboxUnavailable
from tests.agentrl.rollouts import playing

TASK = Task(id="t", prompt="What is it?", answer="7")
LIMITS = RolloutConfig(max_context=2048, max_turn_tokens=200, tool_output_tokens=40, episode_timeout_s=20)


class Echo(ToolEnv):
    """Says what it is told; `fail` decides what goes wrong."""

    max_turns = 4
    closed = 0

    def __init__(self, fail: str = "") -> None:
        self.fail = fail

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return [TASK]

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        if self.fail == "reset":
            raise SandboxUnavailable("down")
        return [user(task.prompt)], {"seed": seed}

    @tool
    async def echo(self, text: str) -> str:
        """Say it again."""
        if self.fail == "tool":
            raise SandboxUnavailable("down")
        if self.fail == "hang":
            await asyncio.sleep(600)
        return text

    async def score(self, episode: Episode) -> dict[str, float]:
        if self.fail == "score":
            raise RuntimeError("grader")
        return {"correct": float(episode.final_text == episode.task.answer)}

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def play(tokenizer: TurnTokenizer) -> Callable[..., Any]:
    async def run(
        script: Script, env: Env | None = None, *, limits: RolloutConfig = LIMITS, **options: Any
    ) -> Trajectory:
        engine = options.pop("engine", None) or ScriptedEngine(tokenizer=tokenizer, script=script)
        rules = {"tokenizer": tokenizer, "config": limits, **options}
        (episode,) = await playing.play_one(env or Echo(), TASK, engine=engine, seed=1, **rules)
        return episode

    return run


class BrokenEngine(ScriptedEngine):
    """Answers through `spoil`, which may change the completion or raise."""

    spoil: Callable[[Completion], Completion]

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        return self.spoil(await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id))


def spoiled(tokenizer: TurnTokenizer, spoil: Callable[[Completion], Completion]) -> BrokenEngine:
    engine = BrokenEngine(tokenizer=tokenizer, script=lambda prompt: "7")
    engine.spoil = spoil
    return engine


async def test_an_episode_is_recorded_token_by_token(play: Callable[..., Any], tokenizer: TurnTokenizer) -> None:
    engine = ScriptedEngine(tokenizer=tokenizer, script=[call("echo", text="é<|im_end|>"), "7"])
    env = Echo()
    episode = await play([], env, engine=engine)

    assert (episode.reward, episode.rewards, episode.stop_reason) == (1.0, {"correct": 1.0}, StopReason.COMPLETED)
    assert env.closed == 1
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.messages[2].content == "é<|im_end|>"
    assert engine.prompts["e-0-1"] + list(episode.turns[1].completion.token_ids) == episode.token_ids()
    said = [i for i, m in zip(episode.token_ids(), episode.action_mask(), strict=True) if m]
    assert said == [i for turn in episode.turns for i in turn.completion.token_ids]
    assert tokenizer.decode(said).endswith("</tool_call><|im_end|>7<|im_end|>")
    assert episode.token_ids().count(tokenizer.close_id) == 2 + 2 + 1  # system, user; the model's two; the tool's
    assert {"tool_calls": 1, "tool_errors": 0, "turns": 2}.items() <= episode.info.items()
    assert episode.info["wall_s"] >= episode.info["tool_s"] >= 0


turns = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=60).map(lambda text: call("echo", text=text)),
    st.sampled_from(["<tool_call>{", "<tool_call>{}</tool_call>", call("no such tool"), "thinking aloud"]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(turns, min_size=4, max_size=4), max_context=st.integers(300, 700), cap=st.integers(20, 120))
async def test_each_prompt_extends_the_last_and_budgets_hold(
    tokenizer: TurnTokenizer, script: list[str | Message], max_context: int, cap: int
) -> None:
    limits = RolloutConfig(max_context=max_context, max_turn_tokens=cap, tool_output_tokens=24)
    engine = ScriptedEngine(tokenizer=tokenizer, script=script)
    (episode,) = await playing.play_one(Echo(), TASK, engine=engine, tokenizer=tokenizer, config=limits)
    ids = episode.token_ids()
    assert len(ids) <= max_context
    assert len(ids) == len(episode.action_mask()) == len(episode.behavior_logprobs())
    position = 0
    for n, turn in enumerate(episode.turns):
        position += len(turn.observation_ids)
        assert engine.prompts[f"e-0-{n}"] == ids[:position]
        position += len(turn.completion.token_ids)
        assert len(turn.completion.token_ids) <= cap
    shown = [m.content for m in episode.messages if m.role == "tool"]
    assert all(tokenizer.count(text) <= 24 for text in shown)
    if any(turn.completion.finish_reason is FinishReason.LENGTH for turn in episode.turns):
        used_up = len(episode.turns[-1].completion.token_ids) == cap
        assert episode.stop_reason is (StopReason.MAX_TURN_TOKENS if used_up else StopReason.MAX_CONTEXT)


async def test_long_tool_output_is_cut_in_tokens_where_the_model_and_the_record_see_it(
    play: Callable[..., Any], tokenizer: TurnTokenizer
) -> None:
    episode = await play([call("echo", text="ab" * 300), "7"], limits=replace_limits(max_turn_tokens=800))
    text = episode.messages[2].content
    assert tokenizer.count(text) <= 40 and "tokens cut" in text
    assert text in tokenizer.decode(episode.turns[1].observation_ids)


async def test_the_turn_budget_ends_an_episode(play: Callable[..., Any]) -> None:
    script = [call("echo", text="x")] * 9
    episode = await play(script)
    assert (episode.stop_reason, len(episode.turns)) == (StopReason.MAX_TURNS, 4)
    assert len((await play(script, max_turns=2)).turns) == 2


async def test_a_cut_turn_ends_the_episode_and_is_scored(play: Callable[..., Any]) -> None:
    episode = await play(["word " * 400])
    assert (episode.stop_reason, episode.reward) == (StopReason.MAX_TURN_TOKENS, 0.0)
    assert episode.turns[0].completion.finish_reason is FinishReason.LENGTH
    episode = await play(["word " * 400], limits=replace_limits(max_context=300))
    assert episode.stop_reason is StopReason.MAX_CONTEXT  # the context left the turn less than its own budget


async def test_a_full_context_ends_the_episode(play: Callable[..., Any]) -> None:
    episode = await play([call("echo", text="y" * 60)] * 20, limits=replace_limits(max_context=700), max_turns=20)
    assert episode.stop_reason is StopReason.MAX_CONTEXT
    assert 2 <= len(episode.turns) < 20 and len(episode.token_ids()) <= 700


async def test_the_wall_clock_ends_an_episode_with_what_was_finished(play: Callable[..., Any]) -> None:
    env = Echo(fail="hang")
    episode = await play([call("echo", text="x")], env, limits=replace_limits(episode_timeout_s=0.2))
    assert (episode.stop_reason, len(episode.turns), env.closed) == (StopReason.TIMEOUT, 1, 1)


async def test_an_engine_that_never_answers_is_no_trajectory(
    play: Callable[..., Any], tokenizer: TurnTokenizer
) -> None:
    slow = ScriptedEngine(tokenizer=tokenizer, script=["7"], latency_s=60)
    with pytest.raises(EngineError, match="no turn was generated"):
        await play([], engine=slow, limits=replace_limits(episode_timeout_s=0.1))


@pytest.mark.parametrize(("fail", "error"), [("reset", SandboxError), ("tool", SandboxError), ("score", EnvError)])
async def test_a_failing_part_raises_and_the_environment_is_closed(
    play: Callable[..., Any], fail: str, error: type[InfraError]
) -> None:
    env = Echo(fail=fail)
    with pytest.raises(error):
        await play([call("echo", text="x"), "7"], env)
    assert env.closed == 1


def fails(completion: Completion) -> Completion:
    raise ConnectionError("refused")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda c: replace(c, finish_reason=FinishReason.ABORT), "aborted"),
        (lambda c: replace(c, token_ids=(), behavior_logprobs=(), version_spans=()), "no token"),
        (lambda c: replace(c, token_ids=(*c.token_ids[:-1], 5)), "stopped at token 5"),
        (fails, "ConnectionError"),
    ],
)
async def test_an_answer_of_the_engine_that_cannot_be_is_no_trajectory(
    play: Callable[..., Any], tokenizer: TurnTokenizer, spoil: Callable[[Completion], Completion], reason: str
) -> None:
    env = Echo()
    with pytest.raises(EngineError, match=reason):
        await play([], env, engine=spoiled(tokenizer, spoil))
    assert env.closed == 1


async def test_more_tokens_than_asked_for_are_refused(play: Callable[..., Any], tokenizer: TurnTokenizer) -> None:
    class Unbounded(ScriptedEngine):
        async def generate(
            self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
        ) -> Completion:
            return await super().generate(
                token_ids, replace(sampling, max_tokens=10_000), request_id=request_id, session_id=session_id
            )

    with pytest.raises(EngineError, match="200 were allowed"):
        await play([], engine=Unbounded(tokenizer=tokenizer, script=["word " * 400]))


async def test_a_prompt_that_does_not_fit_is_the_users_to_mend(play: Callable[..., Any]) -> None:
    limits = RolloutConfig(max_context=40, max_turn_tokens=20)
    with pytest.raises(ConfigError, match=r"task t: its prompt has \d+ tokens"):
        await play(["7"], limits=limits)


async def test_cancelling_an_episode_closes_its_environment(play: Callable[..., Any]) -> None:
    env = Echo(fail="hang")
    episode = asyncio.create_task(play([call("echo", text="x")], env))
    await asyncio.sleep(0.2)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert env.closed == 1


@pytest.fixture
def play_group(tokenizer: TurnTokenizer) -> Callable[..., Any]:
    engine = ScriptedEngine(tokenizer=tokenizer, script=[call("echo", text="x"), "7"], policy_version=3)
    return partial(playing.play_group, task=TASK, group_id=5, engine=engine, tokenizer=tokenizer, config=LIMITS)


async def test_a_group_is_g_episodes_of_one_task_in_environments_of_their_own(
    play_group: Callable[..., Any],
) -> None:
    envs: list[Echo] = []
    group = await play_group(lambda: envs.append(Echo()) or envs[-1], size=3)
    assert [t.id for t in group.trajectories] == ["train-5-0", "train-5-1", "train-5-2"]
    assert (group.rewards_G, group.policy_version, group.group_id) == ([1.0] * 3, 3, 5)
    assert [env.closed for env in envs] == [1, 1, 1]


async def test_a_failed_episode_is_played_again(play_group: Callable[..., Any]) -> None:
    troubles = iter(["", "tool", "", "reset", ""])
    group = await play_group(lambda: Echo(fail=next(troubles)), size=3)
    assert group.rewards_G == [1.0] * 3
    assert list(troubles) == []


class Seeds(ScriptedEngine):
    """Keeps the seed of every request, by its id."""

    seen: dict[str, int | None]

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        self.seen[request_id] = sampling.seed
        return await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)


async def seeds_of(tokenizer: TurnTokenizer, make_env: Callable[[], Echo] = Echo, **options: Any) -> dict[str, Any]:
    engine = Seeds(tokenizer=tokenizer, script=[call("echo", text="x"), "7"])
    engine.seen = {}
    parts: dict[str, Any] = {"engine": engine, "tokenizer": tokenizer, "config": LIMITS, **options}
    await playing.play_group(make_env, TASK, group_id=5, size=3, **parts)
    return engine.seen


async def test_every_request_has_a_seed_of_its_own_which_a_second_play_repeats(tokenizer: TurnTokenizer) -> None:
    seeds = await seeds_of(tokenizer, request_seeds=True)
    assert len(seeds) == len(set(seeds.values())) == 3 * 2
    assert await seeds_of(tokenizer, request_seeds=True) == seeds
    assert await seeds_of(tokenizer, request_seeds=True, seed=1) != seeds
    assert set((await seeds_of(tokenizer)).values()) == {None}


async def test_a_retry_asks_for_the_same_tokens_again(tokenizer: TurnTokenizer) -> None:
    troubles = iter(["", "tool", "", ""])
    seeds = await seeds_of(tokenizer, lambda: Echo(fail=next(troubles)), request_seeds=True)
    (retried,) = {name.rsplit("-", 2)[0] for name in seeds if name.endswith("-1-0")}
    assert seeds[f"{retried}-0-0"] == seeds[f"{retried}-1-0"]


async def test_a_group_with_an_episode_that_keeps_failing_raises_its_error(play_group: Callable[..., Any]) -> None:
    envs: list[Echo] = []

    def make_env() -> Echo:
        envs.append(Echo(fail="hang" if not envs else "tool"))
        return envs[-1]

    with pytest.raises(SandboxError):
        await play_group(make_env, size=2)
    assert len(envs) == 1 + 1 + LIMITS.max_retries
    assert all(env.closed == 1 for env in envs)


async def test_wrong_weights_are_never_retried(play_group: Callable[..., Any], tokenizer: TurnTokenizer) -> None:
    tries: list[int] = []

    def spoil(completion: Completion) -> Completion:
        tries.append(1)
        raise WeightSyncError("checksum")

    with pytest.raises(WeightSyncError):
        await play_group(Echo, size=1, engine=spoiled(tokenizer, spoil))
    assert len(tries) == 1


async def test_tokens_carry_the_version_that_sampled_them(play: Callable[..., Any], tokenizer: TurnTokenizer) -> None:
    engine = ScriptedEngine(tokenizer=tokenizer, script=[call("echo", text="x"), "7"])
    probe: Any = None
    ref = WeightsRef(policy_version=9, num_bytes=0, update_info={}, checksum="", probe=probe)

    class Updating(Echo):
        @tool
        async def echo(self, text: str) -> str:
            """Weights change while the tool runs."""
            await engine.update_weights(ref)
            return text

    episode = await play([], Updating(), engine=engine)
    assert [turn.completion.version_spans[0].version for turn in episode.turns] == [0, 9]
    assert episode.policy_version == 0


def replace_limits(**changes: Any) -> RolloutConfig:
    return LIMITS.model_copy(update=changes)
