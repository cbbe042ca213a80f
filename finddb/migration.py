"""Makes a FindDB of an older release one of this release, with a copy of it beside it first.

Its tables, and its answers, whose rules may change while the tables stay. Own statements rather than a migration tool:
a version is a few lines of SQL that SQLite runs as one transaction, in the tables as they are, whatever their size.
Nothing here knows what the tables hold.
"""

from __future__ import annotations

import itertools
import os
import shutil
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, update

from miofind.errors import DatabaseError
from miofind.finddb import entries, file_version, location, logs, migrations, open_files, schema, schema_versions
from miofind.finddb.sqlite_engine import connect, driver_of
from miofind.finddb.sqlite_file import (
    check_writable_place,
    execute,
    open_file,
    set_log_aside,
    translated,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """What an upgrade did.

    Attributes:
        database: what was upgraded: a file's path, or a server's URL without who asks.
        from_version, to_version: of the schema; a server's have names, "" where there were no tables.
        answers: how many were derived anew from their measurements, since an older release had other rules for them.
        backup: the file as it was, None where there was nothing to do.
    """

    database: str
    from_version: int | str
    to_version: int | str
    answers: int
    backup: Path | None


def upgrade(address: str | Path) -> Upgrade:
    """Bring a FindDB to this release's schema and rules, all of it or nothing; what other processes have stored stays.

    On a server this makes the tables, too, where there are none; no copy of them is kept.

    Processes of this release may use the file meanwhile: they wait. Those of an older schema go on with what they have
    open, and refuse the file when they open it again; those of this schema but older rules store by their own.

    Raises:
        DatabaseError: it does not exist, is a release, or cannot be copied or written; it is as it was then, with no
            backup.
        SchemaVersionError: a newer release wrote it.
    """
    url = location.server_url(address)
    if url is not None:
        return _upgraded_server(url)
    file = location.checked_path(address)
    if file is None or not file.exists():
        raise DatabaseError(f"{location.shown(file)} does not exist as a file: correct the path")
    check_writable_place(file)
    where = location.shown(file)
    with translated(where), open_files.acquired(file, to_write=True) as opened:
        opened.check_locks(where)
        set_log_aside(file, opened)
        return _upgraded(file)


def _upgraded(file: Path) -> Upgrade:
    where = location.shown(file)
    backup, outdated = None, []
    with closing(connect(lambda: open_file(file, "rw"), is_writer=True)) as connection:
        execute(driver_of(connection), "PRAGMA synchronous=FULL")
        try:
            with connection.begin():  # holds the write lock: the backup is the file just before the upgrade
                version = file_version.checked_version(driver_of(connection), where)
                if version == schema_versions.PACKED_VERSION:
                    raise schema_versions.unwritable(where, version)
                outdated = entries.outdated(connection) if version == schema_versions.SCHEMA_VERSION else []
                if version < schema_versions.SCHEMA_VERSION or outdated:
                    backup = _back_up(file, version)
                if version < schema_versions.SCHEMA_VERSION:
                    _upgrade_tables(connection, version)
                    outdated = entries.outdated(connection)
                for problem_id in outdated:
                    entries.rebuild(connection, problem_id)
                if backup is not None:
                    logs.draw(driver_of(connection))
        except BaseException:
            if backup is not None:
                backup.unlink(missing_ok=True)
            raise
    return Upgrade(
        database=str(file),
        from_version=version,
        to_version=schema_versions.SCHEMA_VERSION,
        answers=len(outdated),
        backup=backup,
    )


def _upgraded_server(url: str) -> Upgrade:
    from miofind.finddb.server import Server

    def derive(connection: Connection) -> int:
        outdated = entries.outdated(connection)
        for problem_id in outdated:
            entries.rebuild(connection, problem_id)
        return len(outdated)

    server = Server(url)
    try:
        version = server.bring_up()
        answers = server.transact(derive, alone=True)
    finally:
        server.close()
    return Upgrade(
        database=server.location,
        from_version=version or "",
        to_version=migrations.REVISIONS[-1],
        answers=answers,
        backup=None,
    )


def _upgrade_tables(connection: Connection, version: int) -> None:
    for number in range(version, schema_versions.SCHEMA_VERSION):
        for statement in schema_versions.UPGRADES[number]:
            connection.exec_driver_sql(statement)
    table = schema.meta
    connection.execute(
        update(table).where(table.c.key == "schema_version").values(value=str(schema_versions.SCHEMA_VERSION))
    )


def _back_up(file: Path, version: int) -> Path:
    """A copy of the file and its log, safe on the disk when this returns."""
    temporary = file.with_name(f"{file.name}.backup.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with closing(open_file(file, "ro")) as source, closing(open_file(temporary, "rwc")) as target:
            source.backup(target)
        shutil.copymode(file, temporary)
        backup = _free_name(file, version)
        os.replace(temporary, backup)
        _sync(file.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return backup


def _free_name(file: Path, version: int) -> Path:
    """A name that no backup has; whoever makes one holds the file's write lock, so it stays free."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    stem = f"{file.name}.v{version}-{stamp}"
    names = itertools.chain([f"{stem}.bak"], (f"{stem}-{number}.bak" for number in itertools.count(2)))
    return next(path for path in map(file.with_name, names) if not path.exists())


def _sync(folder: Path) -> None:
    """Put a folder's names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
