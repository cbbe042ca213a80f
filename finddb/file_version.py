"""What an SQLite file says that it is, asked of the driver alone: versions, and what each is read as."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping

from miofind.errors import DatabaseError, SchemaVersionError

SCHEMA_VERSION = 2
"""Of the files that are written to."""

PACKED_VERSION = 3
"""Of releases. It is one of the same count, so that older code refuses them, but no file is upgraded to it: the next
version of files that are written to is 4."""

MIRROR = "mirror"
"""The note that makes a file a mirror of a server, which nobody else writes to."""

UPGRADES: Mapping[int, tuple[str, ...]] = {
    1: (
        "ALTER TABLE measurement ADD COLUMN contended BOOLEAN DEFAULT '0' NOT NULL",
        "ALTER TABLE measurement ADD COLUMN dropped_samples BIGINT DEFAULT '0' NOT NULL",
        "CREATE TABLE verdict (problem_id INTEGER NOT NULL, id VARCHAR NOT NULL, winner TEXT NOT NULL, "
        "ties TEXT NOT NULL, comparisons TEXT NOT NULL, blocks BIGINT NOT NULL, protocol VARCHAR NOT NULL, "
        "environment VARCHAR NOT NULL, created_at VARCHAR NOT NULL, PRIMARY KEY (problem_id, id), "
        "FOREIGN KEY(problem_id) REFERENCES problem (id) ON DELETE CASCADE) WITHOUT ROWID",
    ),
}
"""Statements that make each version the next. They are history: what a release has run is never changed."""

OLDER_AS_THIS: Mapping[int, tuple[str, ...]] = {
    1: (
        "CREATE TEMP VIEW measurement AS SELECT *, 0 AS contended, 0 AS dropped_samples FROM main.measurement",
        "CREATE TEMP VIEW verdict AS SELECT 0 AS problem_id, '' AS id, '' AS winner, '' AS ties, '' AS comparisons, "
        "0 AS blocks, '' AS protocol, '' AS environment, '' AS created_at WHERE 0",
    ),
}
"""Statements that let a connection read each older version as if it were this one, with nothing written."""


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether the database holds no table at all."""
    return not _stored_objects(connection)


def note(connection: sqlite3.Connection, key: str) -> str | None:
    """What a file says of itself, such as "schema_version"; None where it says nothing."""
    found = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if found is None else found[0]


def unwritable(where: str, version: int) -> DatabaseError:
    """Why nothing is written to a file of that version, and what to do; of this version only a mirror is only read."""
    if version == SCHEMA_VERSION:
        return DatabaseError(
            f"{where} mirrors a server and is only read: name it in MIOFIND_SYSTEM_DB, and record in a FindDB of your "
            "own"
        )
    if version == PACKED_VERSION:
        return DatabaseError(
            f"{where} is a release, which is only read: bring what it holds into a FindDB of your own with "
            "`miofind db merge`, and write to that"
        )
    return SchemaVersionError(
        f"{where} has schema version {version}, this release of miofind writes {SCHEMA_VERSION}: run "
        "`miofind db upgrade` on it, which keeps a backup"
    )


def checked_version(connection: sqlite3.Connection, where: str) -> int:
    """The schema version of a database that this release reads: that of its own files, of releases, or an older one.

    Raises:
        SchemaVersionError: a newer schema.
        DatabaseError: no FindDB at all, an empty database, or one with code in it.
    """
    stored = _stored_objects(connection)
    if not stored:  # a full disk leaves such a file, which the next write makes a FindDB
        raise DatabaseError(f"{where} is an empty database: fill it with `miofind tune`, or remove it")
    if not all(stored.values()):
        raise DatabaseError(
            f"{where} holds views or triggers, which no FindDB does: do not trust it, name another file"
        )
    version = _version(connection) if "meta" in stored else None
    if version is None:
        raise DatabaseError(f"{where} is a database of something else, not a FindDB: name another file")
    if version > PACKED_VERSION:
        raise SchemaVersionError(
            f"{where} has schema version {version}, this release of miofind reads {PACKED_VERSION}: "
            "upgrade miofind, or name another file"
        )
    return version


def _stored_objects(connection: sqlite3.Connection) -> dict[str, bool]:
    """What the database is made of, by name; False for what has no pages of its own but computes: views, triggers."""
    found = connection.execute("SELECT name, rootpage FROM sqlite_master").fetchall()
    return {name: bool(page) for name, page in found}


def _version(connection: sqlite3.Connection) -> int | None:
    columns = {name for _, name, *_ in connection.execute("PRAGMA table_xinfo(meta)").fetchall()}
    if not {"key", "value"} <= columns:
        return None
    text = note(connection, "schema_version")
    return int(text) if isinstance(text, str) and re.fullmatch("[1-9][0-9]{0,8}", text) else None
