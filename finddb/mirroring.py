"""A file that follows a server, so that hosts that only ask look up in a file of their own.

Each transaction on the server notes its number at the problems it changed (`schema.change`). A mirror remembers up to
which number it has seen all, and reads what has that or a later one. Numbers are drawn when a transaction begins, so
the oldest that was still open counts, not the newest that had ended
(postgresql.org/docs/current/functions-info.html, pg_current_snapshot).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, delete, insert, select, text

from miofind.errors import DatabaseError, DatabaseTargetError
from miofind.finddb import entries, file_version, location, schema
from miofind.finddb.database import BATCH
from miofind.finddb.legible import legible
from miofind.finddb.sqlite_database import SqliteFile
from miofind.finddb.sqlite_engine import driver_of
from miofind.finddb.validation import checked_history
from miofind.finddb.values import ProblemKey, canonical_json, from_json

if TYPE_CHECKING:
    from miofind.finddb.server import Server

_OLDEST_OPEN = text("SELECT CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint)")
_MAY_IDENTIFY = text(
    "SELECT has_function_privilege('pg_control_system()', 'EXECUTE') AND "
    "has_function_privilege('pg_control_checkpoint()', 'EXECUTE')"
)
_IDENTITY = text(
    "SELECT system_identifier || '.' || timeline_id || '.' || oid || '.' || current_schema() "
    "FROM pg_control_system(), pg_control_checkpoint(), pg_database WHERE datname = current_database()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """What became of a mirror.

    Attributes:
        database: its path.
        changed: problems that are new or not as they were.
        removed: problems that the server has no longer.
        problems: how many there are now.
        is_whole: whether all of them were read, since nothing told what the mirror had.
    """

    database: str
    changed: int
    removed: int
    problems: int
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What a mirror has of which server.

    Attributes:
        server: where it is, for messages.
        identity: what tells a server and its history from others; a restored one has another. "" is none.
        transaction: all before this one were seen.
    """

    server: str
    identity: str
    transaction: int


def mirror(url: str, path: str | Path) -> Mirrored:
    """Make a file hold what a server does at this instant, all of it or nothing; only what is newer is read.

    The file is written to by nobody else. Whoever reads it meanwhile sees what it held before.

    Raises:
        DatabaseError: the server cannot be read, or the file cannot be written.
        DatabaseTargetError: the file is a FindDB of its own.
    """
    file = location.checked_path(path)
    if file is None:
        raise DatabaseTargetError("a mirror is a file that other processes read: name one")
    server_url = location.server_url(url)
    if server_url is None:
        raise DatabaseError(f"{url} is a file, and a mirror is of a server: copy it, or use `miofind db merge`")
    from miofind.finddb.server import Server

    with closing(Server(server_url, read_only=True)) as server, closing(SqliteFile(file, mirrors=True)) as target:
        with server.read():  # before a file is made
            pass
        return target.transact(lambda connection: _followed(connection, target, server))


def _followed(connection: Connection, target: SqliteFile, server: Server) -> Mirrored:
    """The file's lock is held before the server's instant begins: of two at once the later one has the later state."""
    seen = _seen(connection, target)
    with server.one_instant(), server.read() as source:
        now = _present(source, server)
        is_whole = seen is None or not now.identity or seen.identity != now.identity
        is_whole = is_whole or seen is None or seen.transaction > now.transaction
        held = set(entries.problems(connection).values())
        wanted = _all(source) if is_whole or seen is None else _changed_since(source, seen.transaction)
        removed = [key for key, number in wanted.items() if number is None and key in held]
        removed += held - wanted.keys() if is_whole else []
        changed = {number: key for key, number in wanted.items() if number is not None}
        _remove(connection, [*removed, *(key for key in changed.values() if key in held)])
        for batch in _batches(changed):
            entries.add(connection, map(checked_history, entries.histories(source, batch)))
    if changed or removed:
        entries.remove_orphans(connection)
    _note(connection, now)
    return Mirrored(
        database=target.location,
        changed=len(changed),
        removed=len(removed),
        problems=len(entries.problems(connection)),
        is_whole=is_whole,
    )


def _seen(connection: Connection, target: SqliteFile) -> _Seen | None:
    """What the file has seen; None where it is new.

    Raises:
        DatabaseTargetError: it is no mirror, and holds something.
    """
    noted = file_version.note(driver_of(connection), file_version.MIRROR)
    if noted is not None:
        with legible():
            return _Seen(**from_json(noted))
    if entries.problems(connection):
        raise DatabaseTargetError(
            f"{target.where} is a FindDB of its own, which a mirror would replace: name another file, or a new one"
        )
    return None


def _present(source: Connection, server: Server) -> _Seen:
    may_identify = source.execute(_MAY_IDENTIFY).scalar_one()
    identity = str(source.execute(_IDENTITY).scalar_one()) if may_identify else ""
    return _Seen(server=server.location, identity=identity, transaction=source.execute(_OLDEST_OPEN).scalar_one())


def _all(source: Connection) -> dict[ProblemKey, int | None]:
    return {key: number for number, key in entries.problems(source).items()}


def _changed_since(source: Connection, transaction: int) -> dict[ProblemKey, int | None]:
    """The problems that this transaction or a later one changed, with None those that are gone."""
    changed, device, problem = schema.change.c, schema.device, schema.problem
    named = schema.change.outerjoin(device, device.c.identity == changed.device).outerjoin(
        problem, (problem.c.device_id == device.c.id) & (problem.c.network_config == changed.network_config)
    )
    statement = select(changed.device, changed.network_config, problem.c.id).select_from(named)
    statement = statement.where(changed.transaction >= transaction).order_by(changed.device, changed.network_config)
    return {
        ProblemKey(device=name, network_config=network_config): number
        for name, network_config, number in source.execute(statement)
    }


def _remove(connection: Connection, keys: list[ProblemKey]) -> None:
    for key in keys:
        number = entries.find_problem(connection, key.device, key.network_config)
        if number is not None:
            entries.remove_problem(connection, number)


def _batches(problems: Mapping[int, ProblemKey]) -> Iterator[dict[int, ProblemKey]]:
    remaining = iter(problems.items())
    while batch := dict(islice(remaining, BATCH)):
        yield batch


def _note(connection: Connection, seen: _Seen) -> None:
    connection.execute(delete(schema.meta).where(schema.meta.c.key == file_version.MIRROR))
    connection.execute(insert(schema.meta).values(key=file_version.MIRROR, value=canonical_json(asdict(seen))))
