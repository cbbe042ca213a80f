"""What an SQLite file says that it is, asked of the driver alone."""

from __future__ import annotations

import re
import sqlite3

from miofind.errors import DatabaseError, SchemaVersionError
from miofind.finddb.schema_versions import PACKED_VERSION

MIRROR = "mirror"
"""The note that makes a file a mirror of a server, which nobody else writes to."""


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether the database holds no table at all."""
    return not _stored_objects(connection)


def note(connection: sqlite3.Connection, key: str) -> str | None:
    """What a file says of itself, such as "schema_version"; None where it says nothing."""
    found = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if found is None else found[0]


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
