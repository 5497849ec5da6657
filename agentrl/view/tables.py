"""The tables of a run, and their answers to a query. Independent of how rows are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from agentrl.errors import ConfigError
from agentrl.report.metrics import MetricKind
from agentrl.run_folder import EpisodeKind, EpisodeLine
from agentrl.view.query import Query, suggest
from agentrl.view.rows import MessageRow, TokenRow, flat
from agentrl.view.run_reader import RunReader
from agentrl.view.trajectory_files import episode_of

Row = dict[str, Any]


class _Place(NamedTuple):
    """Where a group is."""

    kind: EpisodeKind
    step: int
    eval_set: str
    group_id: int


def ask(readers: Iterable[RunReader], text: str) -> Iterator[Row]:
    """The rows that answer a question, of all runs; each row names its run. Raises ConfigError, also for a column that
    no row has."""
    query = Query.parse(text)
    if query.table not in TABLES:
        raise ConfigError(f"--json: there is no table {query.table!r}. {suggest(query.table, TABLES, 'The tables')}")
    rows = _checked(query, (row for reader in readers for row in _of_run(reader, query)))
    if query.sort:
        rows = iter(_sorted(list(rows), query.sort))
    for row in islice(rows, query.limit):
        yield {name: row[name] for name in query.fields if name in row} if query.fields else row


def _of_run(reader: RunReader, query: Query) -> Iterator[Row]:
    name = reader.name
    for row in TABLES[query.table](reader, query):
        yield {"run": name, **row}


def _checked(query: Query, rows: Iterable[Row]) -> Iterator[Row]:
    """The rows that pass. A column that is in no row at all is a mistake; some rows may lack one."""
    seen: set[str] = set()
    for row in rows:
        seen.update(row)
        if all(condition.holds(row) for condition in query.conditions):
            yield row
    query.check_columns(seen)


def _sorted(rows: list[Row], sort: str) -> list[Row]:
    """By one column; rows without a value come last."""
    column, descending = sort.removeprefix("-"), sort.startswith("-")
    have = [row for row in rows if row.get(column) is not None]
    try:
        have.sort(key=lambda row: row[column], reverse=descending)
    except TypeError:
        have.sort(key=lambda row: str(row[column]), reverse=descending)
    return have + [row for row in rows if row.get(column) is None]


def _runs(reader: RunReader, _: Query) -> Iterator[Row]:
    yield flat(reader.row())


def _measured(kind: MetricKind) -> Callable[[RunReader, Query], Iterator[Row]]:
    def rows(reader: RunReader, _: Query) -> Iterator[Row]:
        for line in reader.metrics(kind):
            yield {"step": line.step, "time_s": line.time_s, **line.values}

    return rows


def chosen_episodes(reader: RunReader, query: Query) -> Iterator[Row]:
    """The episodes that pass, in the order of the files. Each names its environment."""
    return (row for row in _episodes(reader, query) if all(one.holds(row) for one in query.conditions))


def _episodes(reader: RunReader, query: Query) -> Iterator[Row]:
    reader.index.refresh()
    envs = reader.envs()
    for row in reader.index.episodes(**_where(query)):
        yield {**flat(row), "env": envs.get(row.eval_set, "")}


def _groups(reader: RunReader, query: Query) -> Iterator[Row]:
    reader.index.refresh()
    return map(flat, reader.index.groups(**_where(query)))


def _ledger(reader: RunReader, _: Query) -> Iterator[Row]:
    yield from reader.ledger()


def _problems(reader: RunReader, _: Query) -> Iterator[Row]:
    reader.index.refresh()
    for read in (reader.row, reader.ledger, reader.pieces):
        read()
    for problem in reader.problems():
        yield {"problem": problem}


def _messages(reader: RunReader, query: Query) -> Iterator[Row]:
    for place in _places(reader, query):
        for episode_id, segment, line in _segments(reader, place):
            for position, message in enumerate(line.messages):
                calls = [{"id": one.id, "name": one.name, "arguments": one.arguments} for one in message.tool_calls]
                yield flat(
                    MessageRow(
                        kind=place.kind,
                        step=place.step,
                        eval_set=place.eval_set,
                        group_id=place.group_id,
                        episode_id=episode_id,
                        segment=segment,
                        position=position,
                        role=message.role,
                        content=message.content,
                        tool_call_id=message.tool_call_id,
                        tool_calls=tuple(calls),
                    )
                )


def _tokens(reader: RunReader, query: Query) -> Iterator[Row]:
    pieces = reader.pieces()
    for place in _places(reader, query):
        for episode_id, segment, line in _segments(reader, place):
            turns = [
                n
                for n, size in enumerate(line.turns)
                for _ in range(size.num_observation_tokens + size.num_action_tokens)
            ]
            for position, token_id in enumerate(line.token_ids):
                sampled = bool(line.action_mask[position])
                yield flat(
                    TokenRow(
                        kind=place.kind,
                        step=place.step,
                        eval_set=place.eval_set,
                        group_id=place.group_id,
                        episode_id=episode_id,
                        segment=segment,
                        position=position,
                        turn=turns[position],
                        token_id=token_id,
                        text=pieces.text(token_id),
                        sampled=sampled,
                        logprob=line.behavior_logprobs[position] if sampled else None,
                        version=line.policy_versions[position] if sampled else None,
                    )
                )


def _segments(reader: RunReader, place: _Place) -> Iterator[tuple[str, int, EpisodeLine]]:
    """Episode id, number of the segment in it, and its line."""
    seen: dict[str, int] = {}
    for line in reader.group(place.kind, place.step, place.group_id, eval_set=place.eval_set):
        episode_id = episode_of(line)
        seen[episode_id] = seen.get(episode_id, -1) + 1
        yield episode_id, seen[episode_id], line


def _places(reader: RunReader, query: Query) -> Iterator[_Place]:
    """The groups that the conditions leave, so that no other group's file is read."""
    reader.index.refresh()
    known = ("kind", "step", "eval_set", "group_id", "episode_id")
    conditions = [one for one in query.conditions if one.column in known]
    places = (
        _Place(row.kind, row.step, row.eval_set, row.group_id)
        for row in reader.index.episodes(**_where(query))
        if all(one.holds({name: getattr(row, name) for name in known}) for one in conditions)
    )
    yield from dict.fromkeys(places)


def _where(query: Query) -> dict[str, Any]:
    kind, step = query.value_of("kind"), query.value_of("step")
    found: dict[str, Any] = {"kind": kind} if kind in ("train", "eval") else {}
    if (eval_set := query.value_of("eval_set")) is not None:
        found["eval_set"] = eval_set
    return found | ({"step": int(step)} if step is not None and step.isdecimal() else {})


TABLES: Mapping[str, Callable[[RunReader, Query], Iterator[Row]]] = {
    "runs": _runs,
    "steps": _measured("step"),
    "evals": _measured("eval"),
    "events": _measured("event"),
    "episodes": _episodes,
    "groups": _groups,
    "messages": _messages,
    "tokens": _tokens,
    "ledger": _ledger,
    "problems": _problems,
}
"""Name -> the rows of one run. The query may save work, and is checked again on each row."""
