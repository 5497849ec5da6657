"""What a run's measurements say, in sentences: whether it learned, why it did not, what it waited for.

Independent of where the sentences are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.report.learning_signal import LearningSignal, signal_in, total
from agentrl.report.metrics import MetricsLine, held_out_lines


def headline(lines: Sequence[MetricsLine], sets: Sequence[str] = ()) -> str:
    """Whether the run learned, in one sentence for each held-out set; empty without two measurements of one.

    `sets`: the names that come first.
    """
    measured = held_out_lines(lines, sets).items()
    return " ".join(_change(name, evals[0].values, evals[-1].values) for name, evals in measured if len(evals) > 1)


def diagnosis(lines: Sequence[MetricsLine]) -> str:
    """Why the run learns little, and what to do; empty where enough groups were useful."""
    signal = signal_of_run(lines)
    return f"{signal.share_sentence()}. {signal.diagnosis()}" if signal.cause else ""


def signal_of_run(lines: Sequence[MetricsLine]) -> LearningSignal:
    """Of all groups that finished in the run."""
    return total(signal_in(line.values) for line in lines)


def waits(lines: Sequence[MetricsLine]) -> str:
    """A sentence on the bottleneck of the whole run; empty where it was not measured."""
    steps = [line.values for line in lines if line.kind == "step"]
    needed = ("run/step_s", "wait/learner_for_batch_s", "engine/busy_share")
    measured = [values for values in steps if all(name in values for name in needed)]
    total_s = sum(values["run/step_s"] for values in measured)
    if not total_s:
        return ""
    learner = sum(values["wait/learner_for_batch_s"] for values in measured) / total_s
    engine = sum((1 - values["engine/busy_share"]) * values["run/step_s"] for values in measured) / total_s
    text = (
        f"The learner waited for a batch {_percent(learner)} of the time, the engine had nothing to do "
        f"{_percent(engine)} of it: "
    )
    signal = signal_of_run(lines)
    share = f"{_percent(signal.useful_token_share)} of the generated tokens were in useful groups"
    if not signal.groups:
        return text + f"{'generation' if learner > engine else 'the learner'} is the bottleneck."
    if learner <= engine:
        return text + f"the learner is the bottleneck. {share}."
    if signal.useful_token_share >= 0.5:
        return text + f"generation is the bottleneck. {share}."
    return text + f"generation is the bottleneck because most of it is thrown away. Only {share}."


def _change(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    start, end = before["eval/avg_at_n"], after["eval/avg_at_n"]
    what = f"Held-out success{f' on {name}' if name else ''}"
    if start == end:
        return f"{what} stayed at {end:.3f}."
    low, high = (before, after) if start < end else (after, before)
    text = f"{what} {'rose' if start < end else 'fell'} from {start:.3f} to {end:.3f} ({end - start:+.3f})"
    if low.get("eval/avg_at_n_high", 1.0) < high.get("eval/avg_at_n_low", 0.0):
        return f"{text}: the 95 % intervals do not overlap."
    return f"{text}. The 95 % intervals overlap, so the difference may be chance."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
