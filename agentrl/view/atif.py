"""A recorded segment as Harbor's Agent Trajectory Interchange Format, ATIF-v1.7, with token ids and logprobs.

The format: https://github.com/harbor-framework/harbor/blob/main/rfcs/0001-trajectory-format.md. Independent of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from agentrl.run_folder import EpisodeLine
from agentrl.types import Message

SCHEMA_VERSION = "ATIF-v1.7"


def trajectory_of(
    line: EpisodeLine, *, about: Mapping[str, Any], agent: Mapping[str, Any], next_file: str = ""
) -> dict[str, Any]:
    """One ATIF document, as JSON can hold it.

    `about`: what else is known of the episode, into `extra`. `agent`: name, version, model_name. `next_file`: of the
    segment after this one, where the episode's context was cut.

    Each message of the model is a step with the ids and logprobs of the tokens that it sampled (natural log, when they
    were sampled), the ids of its whole prompt and when it was answered; the answers of its tools are its observation.
    """
    steps = list(_steps(line))
    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "session_id": line.episode_id or line.id,
        "trajectory_id": line.id,
        "agent": dict(agent),
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "final_metrics": {
            "total_prompt_tokens": sum(step["metrics"]["prompt_tokens"] for step in steps if "metrics" in step),
            "total_completion_tokens": sum(turn.num_action_tokens for turn in line.turns),
            "total_steps": len(steps),
            "extra": {"reward": line.reward, "rewards": line.rewards, "stop_reason": str(line.stop_reason)},
        },
        "extra": {"task": {"id": line.task.id, "answer": line.task.answer}, "weight": line.weight, **about},
    }
    return found | ({"continued_trajectory_ref": next_file} if next_file else {})


def _steps(line: EpisodeLine) -> Iterator[dict[str, Any]]:
    """Messages in their order; the answers of tools go to the step that called them."""
    calls = _calls_by_message(line)
    step: dict[str, Any] = {}
    for place, message in enumerate(line.messages):
        if message.role == "tool":
            if not step:  # a context that was cut begins with an answer
                step = {"source": "system", "message": ""}
            _observe(step, message)
            continue
        if step:
            yield step
        step = _step(message, calls.get(place, {}))
    if step:
        yield step


def _step(message: Message, call: Mapping[str, Any]) -> dict[str, Any]:
    source = {"assistant": "agent"}.get(message.role, message.role)
    step: dict[str, Any] = {"source": source, "message": message.content}
    if message.tool_calls:
        step["tool_calls"] = [
            {"tool_call_id": call.id, "function_name": call.name, "arguments": call.arguments}
            for call in message.tool_calls
        ]
    return {**step, **call}


def _observe(step: dict[str, Any], message: Message) -> None:
    known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    result = {"content": message.content}
    if message.tool_call_id in known:
        result["source_call_id"] = str(message.tool_call_id)
    step.setdefault("observation", {"results": []})["results"].append(result)


def _calls_by_message(line: EpisodeLine) -> dict[int, dict[str, Any]]:
    """By the place of the model's message. Messages of the model before its first turn are part of the prompt."""
    places = [place for place, message in enumerate(line.messages) if message.role == "assistant"]
    if len(places) < len(line.turns):
        return {}
    return dict(zip(places[len(places) - len(line.turns) :], _calls(line), strict=True))


def _calls(line: EpisodeLine) -> Iterator[dict[str, Any]]:
    """What a turn adds to the step of its message."""
    end = 0
    for turn in line.turns:
        start = end + turn.num_observation_tokens
        end = start + turn.num_action_tokens
        versions: Sequence[int] = line.policy_versions[start:end]
        metrics = {
            "prompt_tokens": start,
            "completion_tokens": turn.num_action_tokens,
            "prompt_token_ids": line.token_ids[:start],
            "completion_token_ids": line.token_ids[start:end],
            "logprobs": line.behavior_logprobs[start:end],
            "extra": {"finish_reason": str(turn.finish_reason), "policy_versions": versions},
        }
        _, answered_at = turn.times
        timestamp = datetime.fromtimestamp(answered_at, UTC).isoformat() if answered_at else None
        yield {"metrics": metrics, "llm_call_count": 1} | ({"timestamp": timestamp} if timestamp else {})
