"""Counts and checks of one FindDB through an open connection; it changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, Executable, Table, func, select

from miofind.errors import DatabaseError
from miofind.finddb import answers, entries, exchange, schema
from miofind.finddb.legible import UnreadableEntryError, checked_text, legible
from miofind.finddb.packing import HistoryCodec, text_of
from miofind.finddb.schema_versions import SCHEMA_VERSION
from miofind.finddb.validation import checked_environment, checked_key, checked_row, checked_scope, checked_verdict
from miofind.finddb.values import Entry, History, ProblemKey, Release, Row, Scope, Stats


def stats(connection: Connection, size_bytes: int, packing: HistoryCodec | None) -> Stats:
    """Counts of what is stored, beside the room that it takes."""
    per_device = (
        select(schema.device.c.identity, func.count())
        .join(schema.problem, schema.problem.c.device_id == schema.device.c.id)
        .group_by(schema.device.c.identity)
        .order_by(schema.device.c.identity)
    )
    return Stats(
        problems=_count(connection, schema.problem),
        environments=_count(connection, schema.environment),
        rechecks=_count(connection, schema.recheck),
        file_bytes=size_bytes,
        by_device=_counts(connection, per_device),
        **(_entry_counts(connection) if packing is None else _packed_counts(connection, packing)),
    )


def problem_findings(
    connection: Connection, version: int, number: int, key: ProblemKey, packing: HistoryCodec | None
) -> list[str]:
    """What is wrong with the entries and the answer of one problem; older schemas had other rules for answers."""
    where = f"{key.device} {key.network_config}"
    try:
        history = entries.history(connection, number, key, packing)
        checked_key(key.device, key.network_config)
    except (UnreadableEntryError, DatabaseError) as error:
        return [f"{where}: an entry cannot be read: {error}"]
    findings = [row_finding(key, row, finding) for row in history.rows if (finding := _fault(history, row))]
    findings += [f"{where}: scope {item.id}: {fault}" for item in history.scopes if (fault := _fault(history, item))]
    findings += [
        f"{where}: verdict {item.id}: {fault}" for item in history.verdicts if (fault := _fault(history, item))
    ]
    findings += [f"{where}: {fault}" for fault in _environment_faults(history)]
    if findings or version < SCHEMA_VERSION:
        return findings
    payload = entries.payload(connection, number)
    if packing is not None:  # compressed anew, it would differ with each release of zlib
        same = packing.unpack(key.device, key.network_config, payload) == text_of(history)
        return [] if same else [f"{where}: the answer is not the one that its rows give: it was altered"]
    same = payload == answers.encode(history.rows, history.scopes, history.verdicts)
    return [] if same else [f"{where}: the stored answer is not the one that its rows give: run `miofind db upgrade`"]


def release_findings(release: Release, histories: Sequence[History]) -> list[str]:
    """Where a file holds something else than the release it says it is."""
    found = replace(exchange.release_of(histories), parent=release.parent)
    if found.content_hash != release.content_hash:
        return [f"its content has the hash {found.content_hash}, the release {release.content_hash}: it was altered"]
    return [] if found == release else ["it says of itself other counts than it has: release it anew"]


def row_finding(key: ProblemKey, row: Row, finding: str) -> str:
    """A finding against a row as one line."""
    return f"{key.device} {key.network_config}: row {row.id} ({row.candidate}): {finding}"


def _fault(history: History, entry: Entry) -> str:
    if not isinstance(entry, Scope) and entry.environment and entry.environment not in history.environments:
        return f"environment {entry.environment!r} is unknown"
    key = (history.device, history.network_config)
    try:
        if isinstance(entry, Row):
            same = checked_row(*key, entry) == entry
        elif isinstance(entry, Scope):
            same = checked_scope(*key, entry) == entry
        else:
            same = checked_verdict(*key, entry) == entry
    except DatabaseError as error:
        return str(error)
    return "" if same else "it holds what a FindDB takes out before it stores"


def _environment_faults(history: History) -> list[str]:
    faults = []
    for name, versions in history.environments.items():
        try:
            altered = checked_environment(versions) != name
        except DatabaseError as error:
            faults.append(str(error))
            continue
        if altered:
            faults.append(f"environment {name!r} is not named by the hash of its versions")
    return faults


def _entry_counts(connection: Connection) -> dict[str, Any]:
    columns = schema.measurement.c
    return {
        "rows": _count(connection, schema.measurement),
        "scopes": _count(connection, schema.scope),
        "verdicts": _count(connection, schema.verdict),
        "by_solver": _count_by(connection, columns.solver_id),
        "by_status": _count_by(connection, columns.status),
    }


def _packed_counts(connection: Connection, packing: HistoryCodec) -> dict[str, Any]:
    payloads: Any = {line.problem_id: line.payload for line in connection.execute(select(schema.answer))}
    problems = entries.problems(connection)
    with legible():
        found = [packing.history_without_ids(key, payloads.get(number)) for number, key in problems.items()]
    rows = [row for history in found for row in history.rows]
    return {
        "rows": len(rows),
        "scopes": sum(len(history.scopes) for history in found),
        "verdicts": sum(len(history.verdicts) for history in found),
        "by_solver": dict(sorted(Counter(row.solver_id for row in rows).items())),
        "by_status": dict(sorted(Counter(row.status for row in rows).items())),
    }


def _count(connection: Connection, table: Table) -> int:
    return connection.execute(select(func.count()).select_from(table)).scalar_one()


def _count_by(connection: Connection, column: ColumnElement[str]) -> dict[str, int]:
    statement = select(column, func.count()).group_by(column).order_by(column)
    return _counts(connection, statement)


def _counts(connection: Connection, statement: Executable) -> dict[str, int]:
    return {checked_text(line[0]): line[1] for line in connection.execute(statement)}
