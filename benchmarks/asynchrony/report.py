"""Fill the generated parts of the pages about asynchrony, and draw their pictures. Measures nothing.

    python -m benchmarks.asynchrony report

A generated part lies between `<!-- asynchrony NAME -->` and `<!-- end of asynchrony NAME -->` of a page; the rest is
written by hand. It works with what there is: a cell that was not measured is a dash, and is listed as missing.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.asynchrony import pictures, records, tables
from benchmarks.asynchrony.arms import ARMS
from benchmarks.asynchrony.records import TARGET, Waits
from benchmarks.asynchrony.tables import Study

FOLDER = Path(__file__).parent
DOCS = FOLDER.parent.parent / "docs"
PAGES = ("results.md", "results-asynchrony.md")
NOT_YET = "*Not measured yet: `python -m benchmarks.asynchrony report` fills this in.*\n"
SEEDS = range(4)
PICTURES: Mapping[str, tuple[Callable[[Study, Path], Path | None], str]] = {
    "speedup": (pictures.speedup, "Times as fast as the best synchronous arm, by the spread of the waits"),
    "scores": (pictures.scores, "Held-out score against seconds of training"),
    "predicted": (pictures.predicted, "Seconds a step, predicted and measured"),
}


def study_of(folder: Path, runs: Path | None = None) -> Study:
    """What is in the folder, or in the file of runs; runs, predictions and calibration may each be missing."""
    calibration = _json(folder / "calibration.json")
    return Study(
        runs=records.load(runs or folder / "runs.jsonl"),
        predictions=_json(folder / "predictions.json"),
        start_score=calibration.get("start_score"),
    )


def parts(study: Study, docs: Path) -> dict[str, str]:
    """Name: Markdown of every generated part. Pictures are drawn into `docs`."""
    found = {
        "list of arms": _list_of_arms(),
        "front": front(study),
        "headline": _headline(study),
        "machine": _machine(study),
    }
    for name in tables.PER_WAITS:
        found[name] = _per_waits(study, name)
    found["clock"] = tables.clock(study)
    for name, (draw, title) in PICTURES.items():
        path = draw(study, docs / f"asynchrony-{name}.svg")
        found[f"picture {name}"] = f"![{title}]({path.name})\n" if path else ""
    found["missing"] = _missing(study)
    return {name: text or NOT_YET for name, text in found.items()}


def filled(page: str, found: Mapping[str, str]) -> str:
    """The page with its generated parts renewed. Raises KeyError for a part that nobody makes."""
    pattern = re.compile(r"<!-- asynchrony (?P<name>[\w ]+) -->\n.*?<!-- end of asynchrony (?P=name) -->\n", re.DOTALL)

    def renewed(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- asynchrony {name} -->\n\n{found[name]}\n<!-- end of asynchrony {name} -->\n"

    return pattern.sub(renewed, page)


def summary(study: Study) -> list[str]:
    """A sentence for each distribution of waits: the fastest asynchronous arm against the best synchronous one."""
    return [f"- {waits}: {told}" for waits in study.waits if (told := _told(study, waits))]


def _told(study: Study, waits: Waits) -> str:
    """Until the score where that was measured, otherwise by useful groups; empty without either."""
    to_score = study.to_target(waits)
    is_scored = _fastest(to_score) is not None
    seconds = to_score if is_scored else study.a_useful_step(waits)
    if not (found := _fastest(seconds)):
        return ""
    (arm, ratio), best = found, records.best_synchronous(seconds)
    what = f"reaches {TARGET}" if is_scored else "makes useful groups"
    expected = study.predicted_ratio(waits, arm, tables.target_s if is_scored else tables.useful_step_s)
    facts = [f"{ratio.num_seeds} paired seed{'s' if ratio.num_seeds > 1 else ''}"]
    facts += [f"predicted {expected:.2f}"] if expected is not None else []
    facts += [] if is_scored else ["not measured until the score"]
    return (
        f"{arm} {what} **{ratio.text()} times as fast** as the best synchronous arm, {best} ({'; '.join(facts)})."
        f"{_others(seconds)}{_open(study, waits) if is_scored else ''}"
    )


def front(study: Study) -> str:
    """Three sentences for a busy reader; empty without a measured ratio where waits have sigma 1."""
    found = {waits: fastest for waits in study.waits if (fastest := _fastest(study.to_target(waits)))}
    waits = next((one for one in found if one.sigma == 1.0), None)
    if waits is None:
        return ""
    arm, ratio = found[waits]
    best = records.best_synchronous(study.to_target(waits))
    goal = "above" if ratio.value >= pictures.GOAL else "below"
    lines = [
        f"Where tools wait unevenly (sigma 1), {arm} reaches a held-out score of {TARGET} **{ratio.text()} times as "
        f"fast** as {best}, the best of the synchronous arms; that is {goal} the goal of {pictures.GOAL:g}."
        f"{_others(study.to_target(waits))}{_open(study, waits)}"
    ]
    control = next((one for one in study.waits if not one.mean_s), None)
    if control and (told := _told(study, control)):
        lines.append(f"Without any wait, {told}")
    if errors := tables.errors(study):
        expected = study.predicted_ratio(waits, arm)
        told = f"{expected:.2f}" if expected is not None else "none"
        lines.append(
            f"The ratio predicted before the runs was {told}; seconds a step are off by a factor of "
            f"{statistics.median(errors):.2f} in the median of {len(errors)} cells, {max(errors):.2f} at most."
        )
    return "\n".join(lines) + "\n"


def _fastest(seconds: Mapping[str, Mapping[int, float]]) -> tuple[str, records.Interval] | None:
    """The asynchronous arm with the largest ratio, of those with the most seeds. `seconds`: by arm and seed."""
    found = {arm: ratio for arm in ("A1", "A2", "A4", "A8") if (ratio := records.ratio(seconds, arm))}
    most = max((ratio.num_seeds for ratio in found.values()), default=0)
    return max(
        ((arm, ratio) for arm, ratio in found.items() if ratio.num_seeds == most),
        key=lambda item: item[1].value,
        default=None,
    )


def _others(seconds: Mapping[str, Mapping[int, float]]) -> str:
    """The ratios of others' rules, which may be better than ours; empty where they were not measured."""
    found = [f"{arm} {ratio.text()}" for arm in ("P1", "P2") if (ratio := records.ratio(seconds, arm))]
    return f" Others' rules on the same engine: {', '.join(found)}." if found else ""


def _open(study: Study, waits: Waits) -> str:
    """The synchronous arms of which it is not known whether they are better than the best one."""
    names = study.open_rivals(waits)
    return f" Not known, for want of runs: whether {', '.join(names)} would be faster." if names else ""


def main(folder: Path = FOLDER, docs: Path = DOCS, *, runs: Path | None = None) -> None:
    """Renew the pages and pictures. `runs`: read instead of the folder's runs.jsonl. Raises DataError."""
    study = study_of(folder, runs)
    found = parts(study, docs)
    for name in PAGES:
        page = docs / name
        page.write_text(filled(page.read_text(), found))
    print(f"{len(study.runs)} runs, {len(study.predictions.get('cells', []))} predicted cells: {', '.join(PAGES)}")


def _headline(study: Study) -> str:
    lines, table = summary(study), tables.headline(study)
    return "\n".join(lines) + "\n\n" + table if lines or table else ""


def _per_waits(study: Study, name: str) -> str:
    """One table for each distribution of waits."""
    made = {waits: tables.PER_WAITS[name](study, waits) for waits in study.all_waits}
    return "\n".join(
        f"**{str(waits).capitalize()}**{_mean_wait(waits)}\n\n{table}" for waits, table in made.items() if table
    )


def _mean_wait(waits: Waits) -> str:
    return f", mean wait of an episode {waits.mean_s:g} s" if waits.mean_s else ""


def _list_of_arms() -> str:
    rows = [[name, arm.about, _settings(arm.settings)] for name, arm in ARMS.items()]
    return reporting.table(["arm", "what it is", "settings"], rows).replace("|---:", "|---")


def _settings(settings: Mapping[str, object]) -> str:
    return ", ".join(f"`{key}: {str(value).lower()}`" for key, value in settings.items()) or "the product's defaults"


def _machine(study: Study) -> str:
    if not study.runs:
        return ""
    heads: dict[str, int] = {}
    for record in study.runs:
        facts = re.findall(r"- (?:commit|machine): ([^;\n]+)", record.get("header", ""))
        heads[", ".join(facts)] = heads.get(", ".join(facts), 0) + 1
    lines = [f"- {count} runs: {head}" for head, count in heads.items()]
    loads = [float(record["load"]) for record in study.runs]
    lines.append(f"- load of the minute before a run, the run before it included: {reporting.spread(loads, 2)}")
    others = [float(record["others_share"]) for record in study.runs if "others_share" in record]
    if others:
        lines.append(f"- share of the machine that other programs took during a run: {reporting.spread(others, 3)}")
    skipped = [record["skipped_s"] / record["steps"][-1]["at_s"] for record in study.runs if "skipped_s" in record]
    if skipped:
        lines.append(f"- share of a run's seconds that were skipped: mean {100 * statistics.fmean(skipped):.0f} %")
    return "\n".join(lines) + "\n"


def _missing(study: Study) -> str:
    if not study.runs:
        return ""
    lines = tables.missing(study, study.all_waits, _seeds(study))
    return "\n".join(f"- {line}" for line in lines) + "\n" if lines else "No cell is missing.\n"


def _seeds(study: Study) -> Sequence[int]:
    return sorted({*SEEDS, *(record["seed"] for record in study.runs)})


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


if __name__ == "__main__":
    main()
