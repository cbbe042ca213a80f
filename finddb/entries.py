"""Rows, scopes, verdicts and answers of problems in and out of an open connection; transactions are the caller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, RowMapping, Table, delete, func, select, union
from sqlalchemy.dialects.sqlite import insert

from miofind.finddb import answers, packing, schema
from miofind.finddb.packing import HistoryCodec
from miofind.finddb.sqlite_file import checked_text, legible
from miofind.finddb.validation import (
    LAST_STAMP,
    RefusedEntryError,
    checked_environment,
    checked_key,
    checked_row,
    checked_scope,
    checked_verdict,
    is_stamp,
)
from miofind.finddb.values import (
    ROW_FIELDS,
    SCOPE_FIELDS,
    VERDICT_FIELDS,
    Entry,
    History,
    ProblemKey,
    Row,
    Scope,
    Verdict,
    canonical_json,
    from_json,
    without_defaults,
)

_TIME_FORM = "%Y-%m-%dT%H:%M:%S.%fZ"
_FACTS = (schema.measurement, schema.scope, schema.verdict)
_ROW_COLUMNS = [schema.measurement.c[name] for name in ROW_FIELDS]
_SCOPE_COLUMNS = [schema.scope.c[name] for name in SCOPE_FIELDS]
_VERDICT_COLUMNS = [schema.verdict.c[name] for name in VERDICT_FIELDS]


def checked(history: History) -> History:
    """The history as it will be stored: of known form, with the ids of its entries.

    Raises:
        RefusedEntryError: something of it cannot be stored.
    """
    key = (history.device, history.network_config)
    checked_key(*key)
    for name, versions in history.environments.items():
        if checked_environment(versions) != name:
            raise RefusedEntryError(f"environment {name!r} is not named by the hash of its versions: it was altered")
    return replace(
        history,
        rows=tuple(checked_row(*key, row) for row in history.rows),
        scopes=tuple(checked_scope(*key, scope) for scope in history.scopes),
        verdicts=tuple(checked_verdict(*key, verdict) for verdict in history.verdicts),
    )


def add(connection: Connection, history: History) -> int:
    """Store a checked history's entries and environments that are not there yet, and derive the answer anew.

    Returns:
        How many rows, scopes and verdicts were new.

    Raises:
        RefusedEntryError: an entry names an environment that neither the history nor the database knows.
    """
    if not history.rows and not history.scopes and not history.verdicts:
        return 0
    problem_id = _problem_id(connection, history.device, history.network_config)
    versions: list[dict[str, object]] = [
        {"id": name, "versions": canonical_json(dict(v))} for name, v in history.environments.items()
    ]
    _insert(connection, schema.environment, versions)
    _check_environments(connection, history)
    added = _insert(connection, schema.measurement, [_row_values(problem_id, row) for row in history.rows])
    added += _insert(connection, schema.scope, [_scope_values(problem_id, scope) for scope in history.scopes])
    added += _insert(connection, schema.verdict, [_verdict_values(problem_id, item) for item in history.verdicts])
    if added:
        rebuild(connection, problem_id)
    return added


def rebuild(connection: Connection, problem_id: int) -> None:
    """Derive a problem's answer anew."""
    payload = _derived(connection, problem_id)
    statement = insert(schema.answer).values(problem_id=problem_id, payload=payload)
    connection.execute(statement.on_conflict_do_update(index_elements=["problem_id"], set_={"payload": payload}))


def outdated(connection: Connection) -> list[int]:
    """Numbers of the problems whose stored answer is not the one that this release derives from their entries."""
    return [number for number in problems(connection) if payload(connection, number) != _derived(connection, number)]


def now() -> str:
    """The present, in the form of `created_at`, which ends before some clocks do."""
    return min(datetime.now(UTC).strftime(_TIME_FORM), LAST_STAMP)


def stamped(history: History, stamp: str) -> History:
    """The history with a time for those entries that have none."""
    return replace(
        history,
        rows=tuple(replace(row, created_at=row.created_at or stamp) for row in history.rows),
        scopes=tuple(replace(scope, created_at=scope.created_at or stamp) for scope in history.scopes),
        verdicts=tuple(replace(verdict, created_at=verdict.created_at or stamp) for verdict in history.verdicts),
    )


def next_stamp(connection: Connection, device: str, network_config: str, present: str) -> str:
    """A time for new entries: the present, or just past the newest entry if the clock was set back since.

    What stands in the place of a time and is none counts for nothing. What would be past the end of times is that end.
    """
    problem_id = find_problem(connection, device, network_config)
    later: list[str] = []
    for table in _FACTS:
        columns = table.c
        newer = (columns.created_at >= present, columns.created_at <= LAST_STAMP)  # of texts: SQLite orders them apart
        statement = select(columns.created_at).where(columns.problem_id == problem_id, *newer).distinct()
        later += filter(is_stamp, connection.execute(statement).scalars())
    if not later:
        return present
    if (latest := max(later)) == LAST_STAMP:
        return LAST_STAMP
    return (datetime.fromisoformat(latest) + timedelta(microseconds=1)).strftime(_TIME_FORM)


def find_problem(connection: Connection, device: str, network_config: str) -> int | None:
    """Number of a problem in this file, None if it holds nothing of it."""
    statement = (
        select(schema.problem.c.id)
        .join(schema.device, schema.problem.c.device_id == schema.device.c.id)
        .where(schema.device.c.identity == device, schema.problem.c.network_config == network_config)
    )
    return connection.execute(statement).scalar()


def problems(connection: Connection, device: str | None = None) -> dict[int, ProblemKey]:
    """All problems by number, in the order of their keys."""
    statement = (
        select(schema.problem.c.id, schema.device.c.identity, schema.problem.c.network_config)
        .join(schema.device, schema.problem.c.device_id == schema.device.c.id)
        .order_by(schema.device.c.identity, schema.problem.c.network_config)
    )
    if device is not None:
        statement = statement.where(schema.device.c.identity == device)
    return {
        number: ProblemKey(device=checked_text(identity), network_config=checked_text(network_config))
        for number, identity, network_config in connection.execute(statement)
    }


def solved_problems(connection: Connection, *, is_packed: bool) -> list[ProblemKey]:
    """The problems whose answer has a row, in the order of their keys.

    Args:
        is_packed: the file is a release, in which every answer has one.
    """
    found = problems(connection)
    if is_packed:
        return list(found.values())
    table = schema.answer.c
    solved = set(connection.execute(select(table.problem_id).where(table.payload.contains("\n"))).scalars())
    return [key for number, key in found.items() if number in solved]


def history(connection: Connection, problem_id: int, key: ProblemKey, packed: HistoryCodec | None = None) -> History:
    """All that is stored of a problem, in a stable order.

    Args:
        packed: how, in a release.
    """
    if packed is None:
        found = History(
            device=key.device,
            network_config=key.network_config,
            rows=tuple(rows_of(connection, problem_id)),
            scopes=tuple(scopes_of(connection, problem_id)),
            verdicts=tuple(verdicts_of(connection, problem_id)),
        )
    else:
        with legible():
            found = packed.history(key, payload(connection, problem_id))
    table = schema.environment
    chosen = table.c.id.in_(sorted(found.named_environments))
    versions = connection.execute(select(table.c.id, table.c.versions).where(chosen)).all()
    return replace(found, environments={name: _versions(text) for name, text in versions})


def payload(connection: Connection, problem_id: int) -> Any:
    """What is stored as a problem's answer, None where nothing is."""
    return connection.execute(select(schema.answer.c.payload).where(schema.answer.c.problem_id == problem_id)).scalar()


def rows_of(connection: Connection, problem_id: int) -> list[Row]:
    """All rows of a problem, by solver, configuration and time."""
    columns = schema.measurement.c
    statement = select(*_ROW_COLUMNS).where(columns.problem_id == problem_id)
    statement = statement.order_by(columns.solver_id, columns.config, columns.created_at, columns.id)
    return [_row(values) for values in connection.execute(statement)]


def scopes_of(connection: Connection, problem_id: int) -> list[Scope]:
    """All scopes of a problem, by time."""
    columns = schema.scope.c
    statement = select(*_SCOPE_COLUMNS).where(columns.problem_id == problem_id)
    return [
        _scope(values) for values in connection.execute(statement.order_by(columns.created_at, columns.id)).mappings()
    ]


def verdicts_of(connection: Connection, problem_id: int) -> list[Verdict]:
    """All verdicts of a problem, by time."""
    columns = schema.verdict.c
    statement = select(*_VERDICT_COLUMNS).where(columns.problem_id == problem_id)
    return [
        _verdict(values) for values in connection.execute(statement.order_by(columns.created_at, columns.id)).mappings()
    ]


def remove(connection: Connection, problem_id: int, entries: Sequence[Entry]) -> int:
    """Remove entries of a problem and derive its answer anew; returns how many rows went."""
    rows = [entry.id for entry in entries if isinstance(entry, Row)]
    scopes = [entry.id for entry in entries if isinstance(entry, Scope)]
    verdicts = [entry.id for entry in entries if isinstance(entry, Verdict)]
    for table, ids in zip(_FACTS, (rows, scopes, verdicts), strict=True):
        for start in range(0, len(ids), 500):
            chosen = table.c.id.in_(ids[start : start + 500])
            connection.execute(delete(table).where(table.c.problem_id == problem_id, chosen))
    if rows or scopes:
        rebuild(connection, problem_id)
    return len(rows)


def remove_problem(connection: Connection, problem_id: int) -> int:
    """Remove a problem with its rows, scopes and answer; returns how many rows went."""
    table = schema.measurement
    count = connection.execute(select(func.count()).where(table.c.problem_id == problem_id)).scalar_one()
    connection.execute(delete(schema.problem).where(schema.problem.c.id == problem_id))
    return count


def remove_orphans(connection: Connection) -> None:
    """Remove environments and devices that nothing names any more."""
    used = union(select(schema.measurement.c.environment), select(schema.verdict.c.environment))
    connection.execute(delete(schema.environment).where(schema.environment.c.id.not_in(used)))
    held = select(schema.problem.c.device_id).distinct()
    connection.execute(delete(schema.device).where(schema.device.c.id.not_in(held)))


def environment(connection: Connection, environment_id: str) -> dict[str, str] | None:
    """The versions that an environment's id stands for, None if it is unknown."""
    table = schema.environment
    text = connection.execute(select(table.c.versions).where(table.c.id == environment_id)).scalar()
    return None if text is None else _versions(text)


def write_packed(connection: Connection, histories: Sequence[History], notes: Mapping[str, str]) -> None:
    """Make an empty database a release of histories as a store gives them out.

    Args:
        notes: what it says of itself.

    Raises:
        RefusedEntryError: one of them is too long.
    """
    texts = [packing.text_of(history) for history in histories]
    schema.create_packed(connection, {"dictionary": "", **notes})
    devices = {name: number for number, name in enumerate(sorted({history.device for history in histories}), 1)}
    connection.execute(insert(schema.device), [{"id": id_, "identity": name} for name, id_ in devices.items()])
    versions = {name: canonical_json(dict(v)) for history in histories for name, v in history.environments.items()}
    _insert(connection, schema.environment, [{"id": name, "versions": versions[name]} for name in sorted(versions)])
    payloads = [
        {"problem_id": number, "payload": packing.pack(history.device, history.network_config, text)}
        for number, (history, text) in enumerate(zip(histories, texts, strict=True), 1)
    ]
    connection.execute(insert(schema.packed_answer), payloads)
    problems = [
        {"id": number, "device_id": devices[history.device], "network_config": history.network_config}
        for number, history in enumerate(histories, 1)
    ]
    connection.execute(insert(schema.packed_problem), problems)


def _derived(connection: Connection, problem_id: int) -> str:
    rows, scopes = rows_of(connection, problem_id), scopes_of(connection, problem_id)
    with legible():
        return answers.encode(rows, scopes, verdicts_of(connection, problem_id))


def _problem_id(connection: Connection, device: str, network_config: str) -> int:
    found = find_problem(connection, device, network_config)
    if found is not None:
        return found
    connection.execute(insert(schema.device).values(identity=device).on_conflict_do_nothing())
    device_id = connection.execute(select(schema.device.c.id).where(schema.device.c.identity == device)).scalar_one()
    values = {"device_id": device_id, "network_config": network_config}
    connection.execute(insert(schema.problem).values(**values))
    number = find_problem(connection, device, network_config)
    assert number is not None
    return number


def _check_environments(connection: Connection, history: History) -> None:
    for name in history.named_environments - history.environments.keys():
        if connection.execute(select(schema.environment.c.id).where(schema.environment.c.id == name)).first() is None:
            raise RefusedEntryError(f"environment {name!r} of an entry is unknown: give its versions with it")


def _insert(connection: Connection, table: Table, values: list[dict[str, object]]) -> int:
    """Insert what is not there yet; returns how many were new."""
    if not values:
        return 0
    return max(connection.execute(insert(table).on_conflict_do_nothing(), values).rowcount, 0)


def _row_values(problem_id: int, row: Row) -> dict[str, object]:
    return {"problem_id": problem_id} | {name: getattr(row, name) for name in ROW_FIELDS}


def _scope_values(problem_id: int, scope: Scope) -> dict[str, object]:
    values = {"problem_id": problem_id} | {name: getattr(scope, name) for name in SCOPE_FIELDS}
    for name in ("solvers", "filters"):
        values[name] = canonical_json(dict(getattr(scope, name)))
    return values


def _verdict_values(problem_id: int, verdict: Verdict) -> dict[str, object]:
    values = {"problem_id": problem_id} | {name: getattr(verdict, name) for name in VERDICT_FIELDS}
    plain = without_defaults(verdict)
    return values | {name: canonical_json(plain[name]) for name in ("ties", "comparisons")}


def _object(text: str) -> dict[str, Any]:
    with legible():
        value = from_json(text)
        if not isinstance(value, dict):
            raise TypeError(f"{text[:60]!r} is not a JSON object")
    return value


def _versions(text: str) -> dict[str, str]:
    versions = _object(text)
    return {name: checked_text(version) for name, version in versions.items()}


def _row(values: Sequence[Any]) -> Row:
    with legible():
        answers.check_kinds(values)
        return Row(**dict(zip(ROW_FIELDS, values, strict=True)))


def _scope(values: RowMapping) -> Scope:
    decoded = {name: _object(values[name]) for name in ("solvers", "filters")}
    with legible():
        return answers.scope_of([decoded.get(name, values[name]) for name in SCOPE_FIELDS])


def _verdict(values: RowMapping) -> Verdict:
    with legible():
        decoded = {name: from_json(values[name]) for name in ("ties", "comparisons")}
        return answers.verdict_of([decoded.get(name, values[name]) for name in VERDICT_FIELDS])
