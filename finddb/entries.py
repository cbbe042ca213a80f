"""Rows, scopes, verdicts and answers of problems in and out of an open connection; transactions are the caller's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Select,
    Table,
    Text,
    bindparam,
    cast,
    delete,
    func,
    insert,
    select,
    union,
    union_all,
)
from sqlalchemy.dialects import sqlite

from miofind.finddb import answers, packing, schema
from miofind.finddb.legible import checked_text, legible
from miofind.finddb.packing import HistoryCodec
from miofind.finddb.stamps import TIME_FORM
from miofind.finddb.validation import LAST_STAMP, RefusedEntryError, is_stamp
from miofind.finddb.values import (
    ROW_FIELDS,
    SCOPE_FIELDS,
    VERDICT_FIELDS,
    Entry,
    History,
    ProblemKey,
    Recheck,
    Row,
    Scope,
    Verdict,
    canonical_json,
    from_json,
    without_defaults,
)

_FACTS = (schema.measurement, schema.scope, schema.verdict)
_ROW_COLUMNS = [schema.measurement.c[name] for name in ROW_FIELDS]
_SCOPE_COLUMNS = [schema.scope.c[name] for name in SCOPE_FIELDS]
_VERDICT_COLUMNS = [schema.verdict.c[name] for name in VERDICT_FIELDS]

_ROW_ORDER = [schema.measurement.c[name] for name in ("solver_id", "config", "created_at", "id")]
_SCOPE_ORDER = [schema.scope.c[name] for name in ("created_at", "id")]
_VERDICT_ORDER = [schema.verdict.c[name] for name in ("created_at", "id")]
_MOST_NAMED = 500  # values in one statement

RIVALS_QUERY = (
    select(schema.problem.c.network_config, *_ROW_COLUMNS)
    .join(schema.problem, schema.measurement.c.problem_id == schema.problem.c.id)
    .join(schema.device, schema.problem.c.device_id == schema.device.c.id)
    .where(
        schema.device.c.identity == bindparam("device"),
        schema.problem.c.network_config >= bindparam("first"),
        schema.problem.c.network_config < bindparam("end"),
        schema.measurement.c.status == bindparam("status"),
    )
)
"""Rows of a status, of problems whose names go from `first` up to `end`, each behind its problem's name. They are asked
for by themselves, at each new call of a program: a problem has fifty other rows."""

_HELD = (
    select(schema.problem.c.id)
    .join(schema.device, schema.problem.c.device_id == schema.device.c.id)
    .where(
        schema.device.c.identity == bindparam("device"),
        schema.problem.c.network_config == bindparam("network_config"),
    )
    .with_for_update(of=schema.problem)
)
_THIS_TRANSACTION = cast(cast(func.pg_current_xact_id(), Text), BigInteger)


def add(connection: Connection, histories: Iterable[History]) -> int:
    """Store what is not there yet of checked histories' entries and environments, and derive their answers anew.

    In the order of their keys, so that two who do this do not wait for each other.

    Returns:
        How many rows, scopes and verdicts were new.

    Raises:
        RefusedEntryError: an entry names an environment that neither a history nor the database knows.
    """
    told = [history for history in histories if history.rows or history.scopes or history.verdicts]
    _add_environments(connection, told)
    told.sort(key=lambda history: (history.device, history.network_config))
    return sum(_add_to(connection, hold(connection, each.device, each.network_config), each) for each in told)


def add_to(connection: Connection, problem_id: int, history: History) -> int:
    """As `add`, of one history whose problem is held."""
    _add_environments(connection, [history])
    return _add_to(connection, problem_id, history)


def _add_environments(connection: Connection, histories: Iterable[History]) -> None:
    versions = {name: canonical_json(dict(v)) for history in histories for name, v in history.environments.items()}
    insert_new(connection, schema.environment, [{"id": name, "versions": versions[name]} for name in sorted(versions)])


def _add_to(connection: Connection, problem_id: int, history: History) -> int:
    _check_environments(connection, history)
    rows, scopes, verdicts = history.rows, history.scopes, history.verdicts
    added = insert_new(connection, schema.measurement, [_row_values(problem_id, row) for row in rows])
    added += insert_new(connection, schema.scope, [_scope_values(problem_id, scope) for scope in scopes])
    added += insert_new(connection, schema.verdict, [_verdict_values(problem_id, item) for item in verdicts])
    if added:
        rebuild(connection, problem_id)
    return added


def rebuild(connection: Connection, problem_id: int) -> None:
    """Derive a problem's answer anew."""
    derived = _derived(connection, problem_id)
    if derived is not None:
        _upsert(connection, schema.answer, {"problem_id": problem_id}, {"payload": derived})
    elif payload(connection, problem_id) is not None:  # a role that may only add need not be able to remove
        connection.execute(delete(schema.answer).where(schema.answer.c.problem_id == problem_id))
    _note_change(connection, problem_id)


def outdated(connection: Connection) -> list[int]:
    """Numbers of the problems whose stored answer is not the one that this release derives from their entries."""
    return [number for number in problems(connection) if payload(connection, number) != _derived(connection, number)]


def next_stamp(connection: Connection, problem_id: int | None, present: str) -> str:
    """A time for new entries: the present, or just past the newest entry if the clock was set back since.

    What stands in the place of a time and is none counts for nothing. What would be past the end of times is that end.

    Args:
        problem_id: None for a problem that nothing is stored of.
    """
    if problem_id is None:
        return present
    stamps: Any = union_all(*(_stamps_from(table, problem_id, present) for table in _FACTS))
    later = list(filter(is_stamp, connection.execute(stamps).scalars()))
    if not later:
        return present
    if (latest := max(later)) == LAST_STAMP:
        return LAST_STAMP
    return (datetime.fromisoformat(latest) + timedelta(microseconds=1)).strftime(TIME_FORM)


def _stamps_from(table: Table, problem_id: int, present: str) -> Select[Any]:
    columns = table.c
    newer = (columns.created_at >= present, columns.created_at <= LAST_STAMP)  # of texts: SQLite orders them apart
    return select(columns.created_at).where(columns.problem_id == problem_id, *newer).distinct()


def find_problem(connection: Connection, device: str, network_config: str) -> int | None:
    """Number of a problem in this file, None if it holds nothing of it."""
    named = {"device": device, "network_config": network_config}
    return connection.execute(_PROBLEM, named).scalar()


_PROBLEM = (  # made once: every look-up asks
    select(schema.problem.c.id)
    .join(schema.device, schema.problem.c.device_id == schema.device.c.id)
    .where(
        schema.device.c.identity == bindparam("device"),
        schema.problem.c.network_config == bindparam("network_config"),
    )
)


def find_problems(connection: Connection, keys: Iterable[ProblemKey]) -> dict[int, ProblemKey]:
    """Those of some problems that this file holds anything of, by number, in the order of their keys."""
    wanted: dict[str, list[str]] = {}
    for key in sorted(set(keys), key=lambda each: (each.device, each.network_config)):
        wanted.setdefault(key.device, []).append(key.network_config)
    statement = (
        select(schema.problem.c.id, schema.problem.c.network_config)
        .join(schema.device, schema.problem.c.device_id == schema.device.c.id)
        .order_by(schema.problem.c.network_config)
    )
    found = {}
    for device, configs in wanted.items():
        for start in range(0, len(configs), _MOST_NAMED):
            chosen = schema.problem.c.network_config.in_(configs[start : start + _MOST_NAMED])
            for number, config in connection.execute(statement.where(schema.device.c.identity == device, chosen)):
                found[number] = ProblemKey(device=device, network_config=config)
    return found


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
    return _with_environments(connection, [found])[0]


def histories(
    connection: Connection, problems: Mapping[int, ProblemKey], packed: HistoryCodec | None = None
) -> list[History]:
    """All that is stored of some problems, in their order, by a few statements for all.

    Args:
        packed: as for `history`.
    """
    if packed is not None:
        stored = payloads(connection, problems)
        with legible():
            found = [packed.history(key, stored.get(number, b"")) for number, key in problems.items()]
        return _with_environments(connection, found)
    rows = _of_problems(connection, _ROW_COLUMNS, _ROW_ORDER, problems)
    scopes = _of_problems(connection, _SCOPE_COLUMNS, _SCOPE_ORDER, problems)
    verdicts = _of_problems(connection, _VERDICT_COLUMNS, _VERDICT_ORDER, problems)
    found = [
        History(
            device=key.device,
            network_config=key.network_config,
            rows=tuple(map(_row, rows.get(number, ()))),
            scopes=tuple(map(_scope, scopes.get(number, ()))),
            verdicts=tuple(map(_verdict, verdicts.get(number, ()))),
        )
        for number, key in problems.items()
    ]
    return _with_environments(connection, found)


def _of_problems(
    connection: Connection, columns: Sequence[Any], order: Sequence[Any], problems: Iterable[int]
) -> dict[int, list[Sequence[Any]]]:
    """The values of each problem's entries in one table."""
    number = columns[0].table.c.problem_id
    statement = select(number, *columns).where(number.in_(list(problems))).order_by(number, *order)
    found: dict[int, list[Sequence[Any]]] = {}
    for of, *values in connection.execute(statement):
        found.setdefault(of, []).append(values)
    return found


def _with_environments(connection: Connection, found: Sequence[History]) -> list[History]:
    named = sorted({name for history in found for name in history.named_environments})
    table = schema.environment
    versions: dict[str, dict[str, str]] = {}
    for start in range(0, len(named), _MOST_NAMED):
        chosen = table.c.id.in_(named[start : start + _MOST_NAMED])
        for name, text in connection.execute(select(table.c.id, table.c.versions).where(chosen)):
            versions[name] = _versions(text)
    return [
        replace(
            history,
            environments={name: versions[name] for name in sorted(history.named_environments & versions.keys())},
        )
        for history in found
    ]


def payload(connection: Connection, problem_id: int) -> Any:
    """What is stored as a problem's answer, None where nothing is."""
    return connection.execute(select(schema.answer.c.payload).where(schema.answer.c.problem_id == problem_id)).scalar()


def payloads(connection: Connection, problems: Iterable[int]) -> dict[int, Any]:
    """What is stored as the answers of some problems."""
    table = schema.answer.c
    chosen = table.problem_id.in_(list(problems))
    found = connection.execute(select(table.problem_id, table.payload).where(chosen))
    return {line.problem_id: line.payload for line in found}


def rows_of(connection: Connection, problem_id: int) -> list[Row]:
    """All rows of a problem, by solver, configuration and time."""
    return [_row(values) for values in _of_problem(connection, _ROW_COLUMNS, _ROW_ORDER, problem_id)]


def scopes_of(connection: Connection, problem_id: int) -> list[Scope]:
    """All scopes of a problem, by time."""
    return [_scope(values) for values in _of_problem(connection, _SCOPE_COLUMNS, _SCOPE_ORDER, problem_id)]


def verdicts_of(connection: Connection, problem_id: int) -> list[Verdict]:
    """All verdicts of a problem, by time."""
    return [_verdict(values) for values in _of_problem(connection, _VERDICT_COLUMNS, _VERDICT_ORDER, problem_id)]


def _of_problem(
    connection: Connection, columns: Sequence[Any], order: Sequence[Any], problem_id: int
) -> Iterable[Sequence[Any]]:
    """The values of a problem's entries in one table."""
    of = columns[0].table.c.problem_id == problem_id
    return connection.execute(select(*columns).where(of).order_by(*order))


def remove(connection: Connection, problem_id: int, entries: Sequence[Entry]) -> int:
    """Remove entries of a problem and derive its answer anew; returns how many rows went.

    A problem goes with its last entry.
    """
    rows = [entry.id for entry in entries if isinstance(entry, Row)]
    scopes = [entry.id for entry in entries if isinstance(entry, Scope)]
    verdicts = [entry.id for entry in entries if isinstance(entry, Verdict)]
    for table, ids in zip(_FACTS, (rows, scopes, verdicts), strict=True):
        for start in range(0, len(ids), 500):
            chosen = table.c.id.in_(ids[start : start + 500])
            connection.execute(delete(table).where(table.c.problem_id == problem_id, chosen))
    if entries and not _has_entries(connection, problem_id):
        remove_problem(connection, problem_id)
    elif rows or scopes:
        rebuild(connection, problem_id)
    elif verdicts:
        _note_change(connection, problem_id)
    return len(rows)


def _has_entries(connection: Connection, problem_id: int) -> bool:
    """Whether something is stored of a problem."""
    first = (select(table.c.id).where(table.c.problem_id == problem_id).limit(1) for table in _FACTS)
    return any(connection.execute(statement).first() is not None for statement in first)


def remove_problem(connection: Connection, problem_id: int) -> int:
    """Remove a problem with its rows, scopes and answer; returns how many rows went."""
    _note_change(connection, problem_id)
    table = schema.measurement
    count = connection.execute(select(func.count()).where(table.c.problem_id == problem_id)).scalar_one()
    connection.execute(delete(schema.problem).where(schema.problem.c.id == problem_id))
    return count


def is_recheck_noted(connection: Connection, device: str, network_config: str, reason: str) -> bool:
    """Whether it is noted that a problem wants measuring again for a reason."""
    table = schema.recheck
    key = {"device": device, "network_config": network_config, "reason": reason}
    return connection.execute(select(table.c.created_at).filter_by(**key)).first() is not None


def note_rechecks(connection: Connection, device: str, network_config: str, reasons: Iterable[str], stamp: str) -> int:
    """Note that a problem wants measuring again for reasons; returns how many are news."""
    key = {"device": device, "network_config": network_config, "created_at": stamp}
    return insert_new(connection, schema.recheck, [key | {"reason": reason} for reason in reasons])


def forget_rechecks(connection: Connection, device: str, network_config: str) -> None:
    """Remove all notes of a problem."""
    connection.execute(delete(schema.recheck).filter_by(device=device, network_config=network_config))


def rechecks(connection: Connection, device: str | None) -> tuple[Recheck, ...]:
    """The notes of a device, None for those of all, the oldest first."""
    table = schema.recheck
    statement = select(table).order_by(table.c.created_at, table.c.device, table.c.network_config, table.c.reason)
    if device is not None:
        statement = statement.where(table.c.device == device)
    found = connection.execute(statement).mappings().all()
    return tuple(Recheck(**{name: checked_text(values[name]) for name in values}) for values in found)


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
    insert_new(connection, schema.environment, [{"id": name, "versions": versions[name]} for name in sorted(versions)])
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


def _derived(connection: Connection, problem_id: int) -> str | None:
    rows, scopes = rows_of(connection, problem_id), scopes_of(connection, problem_id)
    with legible():
        return answers.encode(rows, scopes, verdicts_of(connection, problem_id))


def hold(connection: Connection, device: str, network_config: str) -> int:
    """Number of a problem, which is made where there is none; nobody else adds to it until the transaction ends.

    Of a file nobody does anyway. On a server two who add at once would each derive an answer without the other's rows.
    """
    found = _held(connection, device, network_config)
    if found is not None:
        return found
    device_id = _device(connection, device)
    if device_id is None:
        insert_new(connection, schema.device, [{"identity": device}])
        device_id = _device(connection, device)
    insert_new(connection, schema.problem, [{"device_id": device_id, "network_config": network_config}])
    number = _held(connection, device, network_config)
    assert number is not None
    return number


def _device(connection: Connection, identity: str) -> int | None:
    return connection.execute(select(schema.device.c.id).where(schema.device.c.identity == identity)).scalar()


def _held(connection: Connection, device: str, network_config: str) -> int | None:
    return connection.execute(_HELD, {"device": device, "network_config": network_config}).scalar()


def _check_environments(connection: Connection, history: History) -> None:
    for name in history.named_environments - history.environments.keys():
        if connection.execute(select(schema.environment.c.id).where(schema.environment.c.id == name)).first() is None:
            raise RefusedEntryError(f"environment {name!r} of an entry is unknown: give its versions with it")


def insert_new(connection: Connection, table: Table, values: Sequence[Mapping[str, object]]) -> int:
    """Insert what is not there yet; returns how many were new."""
    if not values:
        return 0
    if connection.dialect.name == "sqlite":
        return max(connection.execute(sqlite.insert(table).on_conflict_do_nothing(), values).rowcount, 0)
    from sqlalchemy.dialects import postgresql  # takes 20 ms, which whoever has a file is spared

    # Of several rows PostgreSQL's driver counts none (rowcount is -1): those that were inserted are told.
    statement = postgresql.insert(table).on_conflict_do_nothing().returning(*table.primary_key.columns)
    return len(connection.execute(statement, values).all())


def _upsert(connection: Connection, table: Table, key: Mapping[str, object], rest: Mapping[str, object]) -> None:
    statement: Any
    if connection.dialect.name == "sqlite":
        statement = sqlite.insert(table).values(**key, **rest)
    else:
        from sqlalchemy.dialects import postgresql

        statement = postgresql.insert(table).values(**key, **rest)
    connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=rest))


def _note_change(connection: Connection, problem_id: int) -> None:
    """Note on a server which transaction changed a problem, or removes it: `mirror` reads on from there."""
    if connection.dialect.name == "sqlite":
        return
    from sqlalchemy.dialects import postgresql

    table = schema.change
    named = (
        select(schema.device.c.identity, schema.problem.c.network_config, _THIS_TRANSACTION)
        .join(schema.device, schema.problem.c.device_id == schema.device.c.id)
        .where(schema.problem.c.id == problem_id)
    )
    columns = [table.c.device, table.c.network_config, table.c.transaction]
    statement = postgresql.insert(table).from_select(columns, named)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=columns[:2],
            set_={"transaction": statement.excluded.transaction},
        )
    )


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
        return answers.row_of(values)


def _scope(values: Sequence[Any]) -> Scope:
    named = dict(zip(SCOPE_FIELDS, values, strict=True))
    decoded = {name: _object(named[name]) for name in ("solvers", "filters")}
    with legible():
        return answers.scope_of([decoded.get(name, named[name]) for name in SCOPE_FIELDS])


def _verdict(values: Sequence[Any]) -> Verdict:
    named = dict(zip(VERDICT_FIELDS, values, strict=True))
    with legible():
        decoded = {name: from_json(named[name]) for name in ("ties", "comparisons")}
        return answers.verdict_of([decoded.get(name, named[name]) for name in VERDICT_FIELDS])
