"""Writes `report.html` from what a run folder contains so far: one file that opens offline."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from agentrl.config import ModelConfig
from agentrl.report.episode_text import Token, tokens_of
from agentrl.report.figures import figures
from agentrl.report.learning_signal import LearningSignal, signal_in, total
from agentrl.report.metrics import MetricsLine, held_out_lines, read
from agentrl.report.statistics import is_correct
from agentrl.run_folder import EpisodeKind, RunFolder, write_atomically
from agentrl.types import EpisodeRecord, Message, ToolCall, Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

TEMPLATES = Path(__file__).parent
NUM_EPISODES = 10
NUM_TOKENS_HEAD, NUM_TOKENS_TAIL = 3000, 1000  # of a long episode's token view
Decode = Callable[[Sequence[int]], str]

_AVERAGE = "Share of the held-out episodes that solved their task: mean over tasks of {n} samples each."
_OVERLAP = (
    "Share of the learner's working time during which the engine generated. At rollout.max_lag=0 they take turns."
)
_USEFUL = "Groups whose rewards differ. The others leave no gradient and are dropped after they were generated."


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """One `Token` as HTML shows it. `version` is set where it differs from that of the previous action token.

    Example:
        TokenSpan(text="42", css="a", colour="rgba(214, 92, 40, 0.10)", title="logprob -0.400, version 7")
    """

    text: str
    css: str
    colour: str = ""
    title: str = ""
    version: int | None = None


def write_report(run: RunFolder) -> Path:
    """Write the page atomically, also for a run that is not over. Returns its path. Raises DiskError."""
    lines = read(run.metrics)
    config = json.loads(run.config.read_text())
    sets = list(config["eval"].get("sets", ()))
    drawn = figures(lines, sets)
    decode = _decoder(config["model"])
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    page = environment.get_template("report.html.j2").render(
        name=config["name"],
        subtitle=_subtitle(config),
        tiles=_tiles(lines, sets),
        nonce=secrets.token_urlsafe(16),
        waits=_waits(lines),
        headline=_headline(lines, sets),
        diagnosis=_diagnosis(lines),
        charts=[{"note": note} for _, note in drawn],
        figures=_json_for_script([figure for figure, _ in drawn]),
        plotly_js=_plotly_js() if drawn else "",
        ledger=_ledger(lines),
        episodes=[_episode(*chosen, decode) for chosen in _choose(run)],
        config=json.dumps(config, indent=2),
    )
    with run.writing(run.report):
        write_atomically(run.report, page.encode())
    return run.report


def _plotly_js() -> Markup:
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs().replace("</script", "<\\/script"))


def _json_for_script(data: Any) -> Markup:
    """JSON that cannot end the script element around it."""
    return Markup(json.dumps(data).replace("<", "\\u003c"))


def _subtitle(config: dict[str, Any]) -> str:
    rollout, algorithm = config["rollout"], config["algorithm"]
    return (
        f"{config['env']['target']} · {config['model']['path']} · {rollout['groups_per_step']} groups of "
        f"{rollout['group_size']} per step, max lag {rollout['max_lag']:g} · baseline {algorithm['baseline']}, step "
        f"scale {algorithm['step_scale']} · lr {config['learner']['lr']:g} · seed {config['seed']}"
    )


def _tiles(lines: Sequence[MetricsLine], sets: Sequence[str]) -> list[dict[str, str]]:
    steps = [line for line in lines if line.kind == "step"]
    tiles: list[dict[str, str]] = []
    for name, evals in held_out_lines(lines, sets).items():
        for line, label in ((evals[0], "before"), (evals[-1], "after" if len(evals) > 1 else "")):
            if label:
                values, n = line.values, int(line.values["eval/n"])
                low, high = values["eval/avg_at_n_low"], values["eval/avg_at_n_high"]
                title = f"{f'{name}: ' if name else ''}avg@{n} {label}, 95 % [{low:.2f}, {high:.2f}]"
                about = f"{_AVERAGE.format(n=n)} Measured on version {line.step}."
                tiles.append(_tile(f"{values['eval/avg_at_n']:.3f}", title, about))
    if steps:
        last = steps[-1].values
        tiles.append(_tile(str(steps[-1].step), "steps", "Optimizer steps. Each makes a new version of the policy."))
        minutes = _duration(lines[-1].time_s - lines[0].time_s)
        tiles.append(_tile(minutes, "from the first to the last measurement", "Training, waiting and evaluations."))
        if "run/overlap" in last:
            tiles.append(_tile(_percent(last["run/overlap"]), "async overlap", _OVERLAP))
    signal = _signal(lines)
    if signal.groups:
        tiles.append(_tile(_percent(signal.useful_share), f"of {signal.groups:.0f} groups were useful", _USEFUL))
    return tiles


def _headline(lines: Sequence[MetricsLine], sets: Sequence[str]) -> str:
    """Whether the run learned, in one sentence for each held-out set; empty without two evaluations."""
    measured = held_out_lines(lines, sets).items()
    return " ".join(_change(name, evals[0].values, evals[-1].values) for name, evals in measured if len(evals) > 1)


def _change(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    start, end = before["eval/avg_at_n"], after["eval/avg_at_n"]
    what = f"Held-out success{f' on {name}' if name else ''}"
    if start == end:
        return f"{what} stayed at {end:.3f}."
    low, high = (before, after) if start < end else (after, before)
    text = f"{what} {'rose' if start < end else 'fell'} from {start:.3f} to {end:.3f} ({end - start:+.3f})"
    if low["eval/avg_at_n_high"] < high["eval/avg_at_n_low"]:
        return f"{text}: the 95 % intervals do not overlap."
    return f"{text}. The 95 % intervals overlap, so the difference may be chance."


def _diagnosis(lines: Sequence[MetricsLine]) -> str:
    """Why the run learns little, and what to do; empty where enough groups were useful."""
    signal = _signal(lines)
    return f"{signal.share_sentence()}. {signal.diagnosis()}" if signal.cause else ""


def _signal(lines: Sequence[MetricsLine]) -> LearningSignal:
    """Of all groups that finished in the run."""
    return total(signal_in(line.values) for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes / 60:.1f} h" if minutes >= 120 else f"{minutes:.1f} min"


def _waits(lines: Sequence[MetricsLine]) -> str:
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
    signal = _signal(lines)
    share = f"{_percent(signal.useful_token_share)} of the generated tokens were in useful groups"
    if not signal.groups:
        return text + f"{'generation' if learner > engine else 'the learner'} is the bottleneck."
    if learner <= engine:
        return text + f"the learner is the bottleneck. {share}."
    if signal.useful_token_share >= 0.5:
        return text + f"generation is the bottleneck. {share}."
    return text + f"generation is the bottleneck because most of it is thrown away. Only {share}."


def _tile(value: str, label: str, about: str) -> dict[str, str]:
    return {"value": value, "label": label, "about": about}


def _ledger(lines: Sequence[MetricsLine]) -> list[tuple[str, str]]:
    last = next((line.values for line in reversed(lines) if line.kind == "step"), {})
    return [
        (name[len("ledger/") :].replace("_", " "), f"{v:.0f}") for name, v in last.items() if name.startswith("ledger/")
    ]


def _choose(run: RunFolder) -> list[tuple[str, TrajectoryGroup, EpisodeRecord]]:
    """About ten episodes from the first and the last files that were kept, of each held-out set in equal parts."""
    sets = run.trajectory_sets()
    if not sets:
        return _choose_of(run, "train", "", NUM_EPISODES)
    of_each = max(2, NUM_EPISODES // len(sets))
    return [episode for name in sets for episode in _choose_of(run, "eval", name, of_each)]


def _choose_of(
    run: RunFolder, kind: EpisodeKind, set_name: str, num_episodes: int
) -> list[tuple[str, TrajectoryGroup, EpisodeRecord]]:
    """Right and wrong ones alternating."""
    chosen: list[tuple[str, TrajectoryGroup, EpisodeRecord]] = []
    steps = run.trajectory_steps(kind=kind, set_name=set_name)
    for step in sorted({*steps[:1], *steps[-1:]}):
        episodes = _one_of_each_first(run.read_trajectories(step, kind=kind, set_name=set_name))
        right = [pair for pair in episodes if is_correct(pair[1].segments[0])]
        wrong = [pair for pair in episodes if not is_correct(pair[1].segments[0])]
        half = num_episodes if steps[0] == steps[-1] else num_episodes // 2
        what = "training" if kind == "train" else f"{set_name}, held out" if set_name else "held out"
        chosen.extend((f"{what}, step {step}", *pair) for pair in _alternate(right, wrong)[:half])
    return chosen


def _one_of_each_first(groups: Sequence[TrajectoryGroup]) -> list[tuple[TrajectoryGroup, EpisodeRecord]]:
    """Every episode: the first of each task, then the second of each, and so on, so that tasks repeat late."""
    ranked = [(rank, group, episode) for group in groups for rank, episode in enumerate(group.episodes)]
    return [(group, episode) for _, group, episode in sorted(ranked, key=lambda item: item[0])]


def _alternate(first: list[Any], second: list[Any]) -> list[Any]:
    shorter = min(len(first), len(second))
    mixed = [item for pair in zip(first, second, strict=False) for item in pair]
    return mixed + first[shorter:] + second[shorter:]


def _episode(when: str, group: TrajectoryGroup, episode: EpisodeRecord, decode: Decode | None) -> dict[str, Any]:
    turns = [turn for segment in episode.segments for turn in segment.turns]
    versions = sorted({span.version for turn in turns for span in turn.completion.version_spans})
    first = episode.segments[0]
    return {
        "when": when,
        "correct": is_correct(first),
        "reward": episode.reward,
        "parts": ", ".join(f"{name} {value:g}" for name, value in first.rewards.items()),
        "stop_reason": str(first.stop_reason),
        "num_turns": len(turns),
        "num_action_tokens": sum(segment.num_action_tokens for segment in episode.segments),
        "versions": " to ".join(str(v) for v in dict.fromkeys((versions[0], versions[-1]))),
        "gold": group.task.answer,
        "segments": [_segment(segment, decode) for segment in episode.segments],
    }


def _segment(trajectory: Trajectory, decode: Decode | None) -> dict[str, Any]:
    return {
        "messages": [_message(message) for message in trajectory.messages],
        "tokens": _spans(trajectory, decode) if decode else [],
    }


def _message(message: Message) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": message.content,
        "calls": [{"name": call.name, "text": _call_text(call)} for call in message.tool_calls],
    }


def _call_text(call: ToolCall) -> str:
    """A single text argument (code, a query) as it is; anything else as JSON."""
    values = list(call.arguments.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(call.arguments, indent=1)


def _spans(trajectory: Trajectory, decode: Decode) -> list[TokenSpan]:
    """The tokens of a segment; the middle of a long one is left out."""
    tokens = list(tokens_of(trajectory, decode))
    num_hidden = max(0, len(tokens) - NUM_TOKENS_HEAD - NUM_TOKENS_TAIL)
    spans: list[TokenSpan] = []
    version = -1
    for position, token in enumerate(tokens):
        if 0 <= position - NUM_TOKENS_HEAD < num_hidden:
            if position == NUM_TOKENS_HEAD:
                spans.append(TokenSpan(text=f"\n[... {num_hidden} tokens are not shown ...]\n", css="o"))
        elif token.is_action:
            spans.append(_action_span(token, is_new_version=token.version != version))
            version = token.version
        else:
            spans.append(TokenSpan(text=token.text, css="o"))
    return spans


def _action_span(token: Token, *, is_new_version: bool) -> TokenSpan:
    """A token of the model: the less probable, the darker."""
    return TokenSpan(
        text=token.text,
        css="a v" if is_new_version else "a",
        colour=f"rgba(214, 92, 40, {min(0.75, -token.logprob / 4):.2f})",
        title=f"logprob {token.logprob:.3f}, version {token.version}",
        version=token.version if is_new_version else None,
    )


def _decoder(model: dict[str, Any]) -> Decode | None:
    """Decodes token ids; None where the model's tokenizer cannot be loaded: the page then has no token view."""
    from agentrl.tokens.tokenizer import load_tokenizer

    path = model["path"]
    if not Path(path, "tokenizer.json").is_file():
        return None
    try:
        return load_tokenizer(ModelConfig.model_validate(model)).decode
    except Exception:
        log.warning("no token view: cannot load the tokenizer of %s", path, exc_info=True)
        return None
