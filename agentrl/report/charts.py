"""Which metrics of a run are drawn together, and how to read them. Independent of how they are drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One picture: its curves, and a sentence on how to read it.

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
        curves={"mean": "rollout/response_tokens_mean", "longest": "rollout/response_tokens_max"},
        note="Sampled tokens of an episode, all turns, over the episodes that ended in this step.",
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
        title="Learning rate",
        curves={"learning rate": "learner/lr"},
        note="After the scale by the effective sample size.",
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
        title="Busy",
        curves={"engine": "engine/busy_share", "both": "run/overlap"},
        note="Share of the time in which the engine generated, and of the learner's working time in which it did.",
    ),
    Chart(
        title="Engine against learner",
        curves={"max": "learner/parity_max_abs", "mean": "learner/parity_mean_abs"},
        note="Difference of logprobs on tokens that were sampled with the learner's own weights.",
    ),
)


def charts_of(metrics: Collection[str]) -> list[Chart]:
    """The charts of a run that measured these metrics, each with the curves that it has.

    >>> [chart.title for chart in charts_of({"learner/entropy", "rollout/reward_mean"})]
    ['Reward of finished groups', 'Entropy']
    """
    found = []
    for chart in (*_rewards_by_name(metrics), *CHARTS):
        curves = {legend: name for legend, name in chart.curves.items() if name in metrics}
        if curves:
            found.append(replace(chart, curves=curves))
    return found


def _rewards_by_name(metrics: Collection[str]) -> list[Chart]:
    """A chart of the named rewards, if there is more than one."""
    prefix = "rollout/reward_"
    names = sorted({name for name in metrics if name.startswith(prefix)} - {f"{prefix}mean"})
    curves = {name.removeprefix(prefix): name for name in names}
    note = (
        "Means over all episodes of the step, before weighting; an episode without one counts as 0. `step` is the sum "
        "of the rewards of single turns."
    )
    return [Chart(title="Rewards by name", curves=curves, note=note)] if len(curves) > 1 else []
