"""Finds training rows that are also in a test set, word for word or nearly. Independent of file formats.

Two problems are near-duplicates when their normalised texts are equal, or when they contain the same numbers, have the
same answer, and share most of their word triples (Jaccard index of the sets: Broder 1997, "On the resemblance and
containment of documents"). Numbers and answers distinguish problems made from one template.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from agentrl.config import EnvConfig
from agentrl.env import Env, Split, rows_of
from agentrl.errors import ConfigError
from agentrl.types import Task

MIN_SIMILARITY = 0.6
SHINGLE_WORDS = 3
MAX_GENERATED_ROWS = 20_000
"""Rows that are compared of a generator, which may be endless."""
MAX_SHOWN = 5
_MARKUP = re.compile(
    r"\\(?:left|right|displaystyle|[dt](?=frac)|text|mathrm|mathbf|mbox|textbf|textit|begin|end|quad|qquad|[,;:! ])"
)
_SPACED = re.compile(r"\\(?:cdots|ldots|dots)")
_TOKEN = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[+\-*/^=<>]")
_Shingle = tuple[str, ...]
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,)(?=\d{3}(?!\d))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A training row and the test row that it repeats.

    Example:
        Overlap(train_id="train-3", test_id="test-9", similarity=0.8)
    """

    train_id: str
    test_id: str
    similarity: float  # 1.0: equal once normalised


def refuse_overlap(env_class: type[Env], config: EnvConfig, *, test_class: type[Env] | None = None) -> None:
    """Raises ConfigError, naming rows, when the run's training data holds problems of its test data.

    `test_class`: the environment of the test data, where it is another.
    Only rows from data are compared: an environment that generates both splits must keep them apart itself.
    """
    if config.allow_overlap or (config.train_data is None and config.eval_data is None):
        return
    train, test = (
        _finite(rows_of(of, split, data=data), max_rows=MAX_GENERATED_ROWS if data is None else None)
        for of, (split, data) in zip((env_class, test_class or env_class), _splits(config), strict=True)
    )
    overlaps = find_overlaps(train, list(test))
    if not overlaps:
        return
    shown = "\n".join(
        f"  {o.train_id} repeats {o.test_id} (similarity {o.similarity:.2f})" for o in overlaps[:MAX_SHOWN]
    )
    more = f"\n  ... and {len(overlaps) - MAX_SHOWN} more" if len(overlaps) > MAX_SHOWN else ""
    raise ConfigError(
        f"{len(overlaps)} rows of env.train_data ({config.train_data or 'generated'}) are also in the test data "
        f"({config.eval_data or 'generated'}):\n{shown}{more}\n"
        "A score on problems that were trained on measures memory. Remove these rows, choose another set, or set "
        "env.allow_overlap: true"
    )


def find_overlaps(
    train: Iterable[Task], test: Sequence[Task], *, min_similarity: float = MIN_SIMILARITY
) -> list[Overlap]:
    """One entry for each training row that is in `test`, with the most similar test row."""
    index = _Index(test)
    found = ((task, index.nearest(task)) for task in train)
    return [
        Overlap(train_id=task.id, test_id=match[0], similarity=match[1])
        for task, match in found
        if match is not None and match[1] >= min_similarity
    ]


def words_of(text: str) -> list[str]:
    """Lower-case words, numbers and operators, without typesetting, punctuation and spacing."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = _THOUSANDS.sub("", _MARKUP.sub(" ", _SPACED.sub(" ", text)))
    return _TOKEN.findall(text)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """One test problem, prepared for comparison."""

    task_id: str
    num_shingles: int
    answer: str  # "" where there is none


class _Index:
    """Test problems by the numbers in them, then by word triple."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._exact: dict[str, str] = {}
        self._holders: dict[str, dict[_Shingle, list[_Problem]]] = {}
        for task in tasks:
            words = words_of(task.prompt)
            shingles = _shingles(words)
            problem = _Problem(task_id=task.id, num_shingles=len(shingles), answer=_bare(task.answer))
            self._exact.setdefault(" ".join(words), task.id)
            holders = self._holders.setdefault(_numbers(words), {})
            for shingle in shingles:
                holders.setdefault(shingle, []).append(problem)

    def nearest(self, task: Task) -> tuple[str, float] | None:
        """(id, similarity) of the most similar test problem; None when none can be the same."""
        words = words_of(task.prompt)
        if (exact := self._exact.get(" ".join(words))) is not None:
            return exact, 1.0
        holders = self._holders.get(_numbers(words))
        if holders is None:
            return None
        shingles, answer = _shingles(words), _bare(task.answer)
        shared = Counter(problem for shingle in shingles for problem in holders.get(shingle, ()))
        near = [
            (num_shared / (len(shingles) + problem.num_shingles - num_shared), problem.task_id)
            for problem, num_shared in shared.items()
            if not (answer and problem.answer) or answer == problem.answer
        ]
        similarity, task_id = max(near, default=(0.0, ""))
        return (task_id, similarity) if near else None


def _shingles(words: Sequence[str]) -> set[_Shingle]:
    if len(words) < SHINGLE_WORDS:
        return {tuple(words)}
    return set(zip(*(words[start:] for start in range(SHINGLE_WORDS)), strict=False))


def _numbers(words: Sequence[str]) -> str:
    return " ".join(sorted(word for word in words if word[0].isdigit()))


def _bare(answer: str | None) -> str:
    """An answer without differences in how it can be written."""
    return re.sub(r"[\s$,{}]|\\[dt](?=frac)|^0+(?=\d)", "", answer or "")


def _splits(config: EnvConfig) -> tuple[tuple[Split, str | None], tuple[Split, str | None]]:
    return ("train", config.train_data), ("test", config.eval_data)


def _finite(tasks: Iterable[Task], *, max_rows: int | None) -> Iterator[Task]:
    """Rows until one repeats: training splits are endless repetitions."""
    seen: set[str] = set()
    for task in islice(tasks, max_rows):
        if task.id in seen:
            return
        seen.add(task.id)
        yield task
