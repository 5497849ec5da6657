"""The curves of a run as plotly figures, by the names of metrics. Independent of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.report.metrics import MetricsLine, held_out_lines

HEIGHT = 250
FEW_STEPS = 8  # shown one by one: an axis of half steps misleads


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure: its curves, and a sentence on how to read it.

    Example:
        Chart(title="Entropy", curves={"entropy": "learner/entropy"}, note="Nats per token.")
    """

    title: str
    curves: Mapping[str, str]  # legend -> metric
    note: str
    stacked: bool = False


LAGS = {"0": "lag_0", "1 to 2": "lag_1_2", "3 to 8": "lag_3_8", "9 and more": "lag_9_up"}
LENGTHS = {
    "up to 128": "length_to_128",
    "up to 512": "length_to_512",
    "up to 2048": "length_to_2048",
    "longer": "length_above",
}


def _by(buckets: Mapping[str, str], what: str) -> dict[str, str]:
    """One curve for each bucket."""
    return {legend: f"vitals/{bucket}_{what}" for legend, bucket in buckets.items()}


CHARTS = (
    # First what tells whether and why a run learns.
    Chart(
        title="Reward of finished groups",
        curves={"reward": "rollout/reward_mean"},
        note="Mean reward of all episodes that ended in this step, including groups of equal rewards.",
    ),
    Chart(
        title="Useful groups",
        curves={"of groups": "rollout/useful_groups", "of tokens": "rollout/useful_tokens"},
        note="Share of the finished groups whose rewards differ, and of the generated tokens that are in them. Groups "
        "of equal rewards teach nothing and are dropped.",
    ),
    Chart(
        title="Groups without a signal",
        curves={"all wrong": "rollout/solve_none", "all right": "rollout/solve_all"},
        note="Share of groups whose members all failed or all solved the task.",
        stacked=True,
    ),
    Chart(
        title="How episodes end",
        curves={
            "completed": "rollout/stop_completed",
            "out of context": "rollout/stop_max_context",
            "turn cut": "rollout/stop_max_turn_tokens",
            "out of turns": "rollout/stop_max_turns",
            "truncated by the environment": "rollout/stop_truncated",
            "timeout": "rollout/stop_timeout",
        },
        note="Share of episodes.",
        stacked=True,
    ),
    Chart(
        title="Response length",
        curves={"tokens": "rollout/response_tokens_mean"},
        note="Sampled tokens of an episode, all turns: mean over the episodes that ended in this step.",
    ),
    Chart(
        title="Turns and tools",
        curves={
            "turns": "rollout/turns_mean",
            "tool calls": "rollout/tool_calls_mean",
            "tool success": "rollout/tool_success_rate",
        },
        note="Means over the episodes; success is the share of tool calls without an error.",
    ),
    Chart(
        title="Entropy",
        curves={"entropy": "learner/entropy"},
        note="Nats per token. Near 0, the policy has stopped exploring.",
    ),
    Chart(
        title="What waits for what",
        curves={
            "learner for a batch": "wait/learner_for_batch_s",
            "rollouts for a slot": "wait/rollout_for_slot_s",
            "learner for engines to take weights": "learner/publish_s",
            "generation during an update": "engine/update_gap_s",
        },
        note="Seconds in each step. The tallest is the bottleneck.",
        stacked=True,
    ),
    Chart(
        title="Effective sample size",
        curves={
            "ESS ratio": "learner/ess_ratio",
            "ESS ratio, truncated weights": "learner/ess_ratio_truncated",
            "learning-rate scale": "learner/lr_scale",
        },
        note="Share of the batch that counts after importance weighting; the learning rate is scaled by it.",
    ),
    Chart(
        title="Gradient norm",
        curves={"before clipping": "learner/grad_norm"},
        note="Norm of the whole batch's gradient.",
    ),
    Chart(
        title="Importance weights",
        curves={"max": "learner/max_weight", "mean": "learner/mean_weight"},
        note="A mean that moves away from 1 precedes a collapse.",
    ),
    Chart(
        title="Clipped weights",
        curves={"clip fraction": "learner/clip_fraction"},
        note="Share of the importance weights that were cut, masked or clipped: of trajectories, or of tokens where "
        "each has its own.",
    ),
    Chart(
        title="Baselines against the mean reward",
        curves={
            "mean": "learner/baseline_minus_mean",
            "lowest": "learner/baseline_minus_mean_min",
            "highest": "learner/baseline_minus_mean_max",
        },
        note="Over the step's groups. Far above 0, one success dominates its group and pushes the others down.",
    ),
    Chart(
        title="Variance of the gradient",
        curves={
            "in use": "vitals/variance",
            "no baseline": "vitals/variance_none",
            "mean": "vitals/variance_mean",
            "leave one out": "vitals/variance_leave_one_out",
            "length-weighted": "vitals/variance_length_weighted",
            "optimal": "vitals/variance_opob",
            "optimal, safe": "vitals/variance_opob_safe",
        },
        note="Trace of the gradient's covariance in this step, in use and under other baselines.",
    ),
    Chart(
        title="Variance of the gradient, measured",
        curves={
            "no baseline": "vitals/split_variance_none",
            "mean": "vitals/split_variance_mean",
            "leave one out": "vitals/split_variance_leave_one_out",
            "length-weighted": "vitals/split_variance_length_weighted",
            "optimal": "vitals/split_variance_opob",
            "optimal, safe": "vitals/split_variance_opob_safe",
            "optimal token": "vitals/split_variance_otb",
        },
        note="From halves of the batch, every algorithm.variance_every steps. One point is noisy: read the trend.",
    ),
    Chart(
        title="Effective sample size by lag",
        curves=_by(LAGS, "ess_ratio"),
        note="ESS ratio among the trajectories of one age. Where it falls first, data is too old.",
    ),
    Chart(
        title="Largest weight by lag",
        curves=_by(LAGS, "max_weight"),
        note="Before truncation.",
    ),
    Chart(
        title="Clipped weights by lag",
        curves=_by(LAGS, "clip_fraction"),
        note="Share of the weights of one age that were cut, masked or clipped.",
    ),
    Chart(
        title="KL by lag",
        curves=_by(LAGS, "kl"),
        note="Nats per token between the weights that sampled and the current policy.",
    ),
    Chart(
        title="Gradient by lag",
        curves=_by(LAGS, "gradient_share"),
        note="Share of each age in the squared gradient norm, if trajectories are orthogonal.",
        stacked=True,
    ),
    Chart(
        title="Effective sample size by length",
        curves=_by(LENGTHS, "ess_ratio"),
        note="By action tokens of a trajectory. Long ones lose effective samples first: their log-ratios add up.",
    ),
    Chart(
        title="Largest weight by length",
        curves=_by(LENGTHS, "max_weight"),
        note="Before truncation.",
    ),
    Chart(
        title="Clipped weights by length",
        curves=_by(LENGTHS, "clip_fraction"),
        note="Share of the weights of one length that were cut, masked or clipped.",
    ),
    Chart(
        title="KL by length",
        curves=_by(LENGTHS, "kl"),
        note="Nats per token between the weights that sampled and the current policy.",
    ),
    Chart(
        title="Gradient by length",
        curves=_by(LENGTHS, "gradient_share"),
        note="Share of each length in the squared gradient norm, if trajectories are orthogonal.",
        stacked=True,
    ),
    Chart(
        title="KL(behaviour, policy)",
        curves={"KL": "learner/kl"},
        note="Nats per token: distance of the policy from the weights that sampled the batch.",
    ),
    Chart(
        title="Lag",
        curves={"mean": "learner/lag_mean", "max": "learner/lag_max", "admission": "buffer/admission_lag"},
        note="Learner version minus the oldest version in a trajectory, when it is consumed; and the lag that "
        "admission allows, which falls while the effective sample size is too low.",
    ),
    Chart(
        title="Tokens per second",
        curves={"engine": "engine/tokens_per_s", "learner": "learner/tokens_per_s"},
        note="Engine: sampled tokens. Learner: tokens of the batch, prompts included.",
    ),
    Chart(
        title="Engine against learner",
        curves={"max": "learner/parity_max_abs", "mean": "learner/parity_mean_abs"},
        note="Difference of logprobs on tokens that were sampled with the learner's own weights.",
    ),
)


def figures(lines: Sequence[MetricsLine], sets: Sequence[str] = ()) -> list[tuple[dict[str, Any], str]]:
    """(plotly figure as a plain dict, note) for every chart with at least one measurement.

    `sets`: the order of the held-out sets.
    """
    steps = [line for line in lines if line.kind == "step"]
    drawn = [(_figure(chart, steps), chart.note) for chart in (*_rewards_by_name(steps), *CHARTS)]
    note = "Held-out tasks, played with the code of training; the band is the 95 % interval."
    held_out = [(_held_out(name, evals), note) for name, evals in held_out_lines(lines, sets).items()]
    return [*held_out, *((figure, note) for figure, note in drawn if figure["data"])]


def _rewards_by_name(steps: Sequence[MetricsLine]) -> list[Chart]:
    """A chart of the named rewards, if there is more than one."""
    prefix = "rollout/reward_"
    names = sorted({name for line in steps for name in line.values if name.startswith(prefix)} - {f"{prefix}mean"})
    curves = {name.removeprefix(prefix): name for name in names}
    note = (
        "Means over all episodes of the step, before weighting; an episode without one counts as 0. `step` is the sum "
        "of the rewards of single turns."
    )
    return [Chart(title="Rewards by name", curves=curves, note=note)] if len(curves) > 1 else []


def _figure(chart: Chart, steps: Sequence[MetricsLine]) -> dict[str, Any]:
    traces = []
    for legend, metric in chart.curves.items():
        points = [(line.step, line.values[metric]) for line in steps if metric in line.values]
        if not points:
            continue
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines+markers" if len(points) < 8 else "lines",
            "name": legend,
            "x": [step for step, _ in points],
            "y": [float(f"{value:.6g}") for _, value in points],
        }
        traces.append(trace | ({"stackgroup": "one"} if chart.stacked else {}))
    if chart.stacked:  # what never happened would only fill the legend
        traces = [trace for trace in traces if any(trace["y"])] or traces
    layout = _layout(chart.title, num_steps=steps[-1].step if steps else 0)
    return {"data": traces, "layout": layout | {"showlegend": len(chart.curves) > 1}}


def _held_out(name: str, evals: Sequence[MetricsLine]) -> dict[str, Any]:
    x = [line.step for line in evals]
    low = [line.values["eval/avg_at_n_low"] for line in evals]
    high = [line.values["eval/avg_at_n_high"] for line in evals]
    n = int(evals[0].values["eval/n"])
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": [*x, *reversed(x)],
        "y": [*high, *reversed(low)],
        "fill": "toself",
        "line": {"width": 0},
        "opacity": 0.25,
        "name": "95 %",
        "hoverinfo": "skip",
    }
    average = _curve(f"avg@{n}", x, [line.values["eval/avg_at_n"] for line in evals])
    best = _curve(f"pass@{n}", x, [line.values["eval/pass_at_n"] for line in evals])
    layout = _layout(f"Held-out success{f', {name}' if name else ''}", num_steps=x[-1])
    layout["yaxis"] = {"range": [0, 1.03]}
    return {"data": [band, average, best], "layout": layout}


def _curve(name: str, x: list[int], y: list[float]) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines+markers", "name": name, "x": x, "y": y}


def _layout(title: str, *, num_steps: int) -> dict[str, Any]:
    return {
        "title": {"text": title, "x": 0.02, "font": {"size": 14}},
        "height": HEIGHT,
        "margin": {"l": 44, "r": 12, "t": 36, "b": 34},
        "legend": {"orientation": "h", "y": -0.18},
        "xaxis": {"rangemode": "tozero"} | ({"dtick": 1} if num_steps <= FEW_STEPS else {}),
        "yaxis": {"rangemode": "tozero"},
    }
