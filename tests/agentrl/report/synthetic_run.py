"""A believable finished run, made by the real writers, for tests of the report and for looking at it.

python tests/agentrl/report/synthetic_run.py OUT_DIR     # makes the run and prints the path of its report
"""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

from agentrl.config import Config, parse
from agentrl.report.learning_signal import signal_of, total
from agentrl.report.metrics import MetricsLog, rollout_metrics
from agentrl.report.statistics import summarize
from agentrl.run_folder import RunFolder
from agentrl.testing import group
from agentrl.types import (
    Completion,
    FinishReason,
    Message,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    VersionSpan,
    system,
    user,
)

SYSTEM = "Solve the problem. You may run Python with the `python` tool. End with the answer in \\boxed{}."


class Words:
    """A tokenizer of a kind: every word, space or sign is a token."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.ids.setdefault(piece, len(self.ids)) for piece in re.findall(r"\s*\w+|\s*\W", text))

    def decode(self, token_id: int) -> str:
        return list(self.ids)[token_id]


def make_config(name: str = "quickstart") -> Config:
    return parse(
        {"name": name, "env": {"target": "envs.modmath:ModMath"}, "model": {"path": "models/quickstart"}},
        source="test",
    )


def make_completion(words: Words, text: str, *, version: int, rng: random.Random, sure: float) -> Completion:
    """Sampled text; half of the long ones saw a weight update on their way."""
    token_ids = words.encode(text)
    logprobs = tuple(-rng.expovariate(1.0) * (1.6 - sure) if rng.random() < 0.5 else -0.002 for _ in token_ids)
    cut = len(token_ids) // 2
    spans = (VersionSpan(version=version, start=0, end=len(token_ids)),)
    if cut > 4 and rng.random() < 0.5:
        spans = (
            VersionSpan(version=version, start=0, end=cut),
            VersionSpan(version=version + 1, start=cut, end=len(token_ids)),
        )
    return Completion(
        token_ids=token_ids, behavior_logprobs=logprobs, version_spans=spans, finish_reason=FinishReason.STOP
    )


def make_trajectory(
    words: Words, task: Task, *, index: int, version: int, correct: bool, rng: random.Random, sure: float
) -> Trajectory:
    """Two or three turns: code, its output, an answer."""
    base, exponent, modulus = (task.metadata[key] for key in ("base", "exponent", "modulus"))
    answer = str(task.answer) if correct else str(rng.randrange(modulus))
    messages = [system(SYSTEM), user(task.prompt)]
    turns = []
    observation = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{task.prompt}<|im_end|>\n"
    codes = [f"r = pow({base}, {exponent}, {modulus})\nprint(r)"]
    outputs = [answer]
    if rng.random() < 0.4:
        codes.insert(0, f"print({base} ** {exponent} %% {modulus})")
        outputs.insert(
            0, f"Traceback (most recent call last):\n  File '<cell>', line 1\n    print({base} ** %%\nSyntaxError"
        )
    for n, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        thought = "Let me compute this directly." if n == 0 else "The operator was wrong; pow takes the modulus."
        call = ToolCall(id=f"call_{n}", name="python", arguments={"code": code})
        said = (
            f'{thought}\n<tool_call>\n{{"name": "python", "arguments": {{"code": "{code}"}}}}\n</tool_call><|im_end|>'
        )
        completion = make_completion(words, said, version=version, rng=rng, sure=sure)
        turns.append(Turn(observation_ids=words.encode(observation), completion=completion))
        messages.append(Message(role="assistant", content=thought, tool_calls=(call,)))
        messages.append(Message(role="tool", content=output, tool_call_id=call.id))
        observation = f"\n<|im_start|>tool\n{output}<|im_end|>\n<|im_start|>assistant\n"
    final = f"The remainder is \\boxed{{{answer}}}."
    completion = make_completion(words, final + "<|im_end|>", version=version + 1, rng=rng, sure=sure)
    turns.append(Turn(observation_ids=words.encode(observation), completion=completion))
    messages.append(Message(role="assistant", content=final))
    stop = StopReason.COMPLETED if correct or rng.random() < 0.7 else rng.choice(list(StopReason))
    return Trajectory(
        id=f"{task.id}-{version}-{index}",
        task_id=task.id,
        turns=tuple(turns),
        messages=tuple(messages),
        reward=float(correct),
        rewards={"correct": float(correct)},
        stop_reason=stop,
        info={
            "tool_calls": len(codes),
            "tool_errors": len(codes) - 1,
            "sandbox_s": 0.02 + 0.02 * rng.random(),
            "wall_s": 1.0 + 2 * rng.random(),
        },
    )


def make_group(words: Words, group_id: int, *, version: int, skill: float, rng: random.Random, size: int = 8):
    """G episodes of one problem, each right with probability `skill`."""
    base, exponent, modulus = rng.randint(2, 40), rng.randint(20, 400), rng.randint(11, 999)
    task = Task(
        id=f"modmath-{group_id}",
        prompt=f"Find the remainder when ${base}^{{{exponent}}}$ is divided by {modulus}.",
        answer=str(pow(base, exponent, modulus)),
        metadata={"base": base, "exponent": exponent, "modulus": modulus},
    )
    members = tuple(
        make_trajectory(words, task, index=i, version=version, correct=rng.random() < skill, rng=rng, sure=skill)
        for i in range(size)
    )
    return group(group_id, members, task=task)


def learner_metrics(step: int, rng: random.Random) -> dict[str, float]:
    """What learner, buffer and engine report in one step; a rough patch around step 70."""
    rough = math.exp(-(((step - 70) / 6) ** 2))
    ess = max(0.15, 0.95 - 0.05 * rng.random() - 0.55 * rough)
    lag = min(2.0, 0.4 + 1.3 * rng.random())
    in_flight, ready, dropped, zero_variance = rng.randint(8, 20), rng.randint(2, 12), step // 9, step // 6
    trained, failed = 8 * step, step // 50
    return {
        "learner/ess_ratio": ess,
        "learner/ess_ratio_truncated": min(1.0, ess + 0.1 * rough),
        "learner/mean_weight": 1 + 0.1 * (rng.random() - 0.5),
        "learner/max_weight": 1.6 + rng.random() + 9 * rough,
        "learner/clip_fraction": 0.12 * rough,
        "learner/lr": 5e-4 * math.sqrt(ess),
        "learner/lr_scale": math.sqrt(ess),
        "learner/rho_base": 0.93,
        "learner/grad_norm": 0.8 + 0.5 * rng.random() + 2.0 * rough,
        "learner/kl": 0.002 + 0.003 * rng.random() + 0.02 * rough,
        "learner/entropy": 0.9 * math.exp(-step / 90) + 0.15,
        "learner/zero_variance_groups": rng.randint(0, 3),
        "learner/lag_mean": lag,
        "learner/lag_max": 2.0,
        "learner/num_tokens": 12_000 + rng.randint(0, 3000),
        "learner/num_action_tokens": 5_000 + rng.randint(0, 900),
        "learner/step_s": 2.6 + rng.random(),
        "learner/tokens_per_s": 4200 + 500 * rng.random(),
        "learner/skipped_steps": 0,
        "buffer/ready_groups": ready,
        "buffer/in_flight_groups": in_flight,
        "ledger/issued": in_flight + ready + trained + dropped + zero_variance + failed,
        "ledger/in_flight": in_flight,
        "ledger/ready": ready,
        "ledger/trained": trained,
        "ledger/dropped_stale": dropped,
        "ledger/dropped_zero_variance": zero_variance,
        "ledger/failed": failed,
        "engine/busy_share": 0.85 + 0.1 * rng.random(),
        "run/step_s": 3.2 + rng.random(),
        "engine/tokens_per_s": 1700 + 300 * rng.random(),
        "engine/update_gap_s": 0.05 + 0.03 * rng.random(),
        "wait/learner_for_batch_s": 0.3 + 0.5 * rng.random(),
        "wait/rollout_for_slot_s": 1.1 * rng.random(),
        "wait/weights_s": 0.1 + 0.05 * rng.random(),
        "run/overlap": 0.86 + 0.05 * rng.random(),
    }


def make_run(out_dir: Path, *, num_steps: int = 120, words: Words | None = None, with_eval: bool = True) -> RunFolder:
    """A run of `num_steps` steps; the reward rises from about 0.25 to about 0.75."""
    rng, words = random.Random(0), words or Words()
    folder = RunFolder.create(out_dir, "quickstart", config=make_config())
    with MetricsLog(folder) as metrics:
        for step in range(num_steps + 1):
            skill = 0.25 + 0.5 * (1 - math.exp(-step / 45))
            if with_eval and (step % 30 == 0 or step == num_steps):
                held_out = [make_group(words, i, version=step, skill=skill, rng=rng, size=4) for i in range(48)]
                folder.write_trajectories(step, held_out, kind="eval")
                metrics.log("eval", step, summarize(held_out, policy_version=step).metrics())
            if step:
                version = max(0, step - 2)
                groups = [make_group(words, 8 * step + i, version=version, skill=skill, rng=rng) for i in range(8)]
                folder.write_trajectories(step, groups)
                signal = total(map(signal_of, groups)).metrics()
                metrics.log("step", step, {**rollout_metrics(groups), **signal, **learner_metrics(step, rng)})
    return folder
