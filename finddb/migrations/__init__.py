"""The tables on a server, revision by revision: Alembic brings those of an older release up to this one's.

A revision is a file of `versions` that is never changed once it was released: it spells its tables out, and imports
none of them. They form one line, noted in the table `miofind_alembic` beside the user's own tables. The tables of
another part of the package, such as the fleet's, get theirs in the same line:

1. Describe them in a MetaData of that part, for queries. Types of texts that are ordered or indexed have
   `collation="C"`.
2. Add `versions/r0002_fleet.py`: `revision = "0002_fleet"`, `down_revision` the last one before it, `upgrade()` that
   makes the tables by `op.create_table`, and `downgrade()`.
3. Append its name to REVISIONS.
4. Add the MetaData to `described()` in tests/finddb/test_finddb_server_schema.py, which compares with it what the
   revisions make.

A server is made by whoever first writes to it, and brought up by `miofind db upgrade --db URL` alone. What needs the
tables of a revision asks for it by `require`. SQLite files have UPGRADES in `schema_versions` instead, and no Alembic.
"""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from miofind.errors import DatabaseError, SchemaVersionError

REVISIONS = ("0001_finddb", "0002_fleet", "0003_claims")
"""All that this release knows, the oldest first."""

FINDDB = "0001_finddb"
"""The first that has all tables of a FindDB as this release reads and writes them."""

VERSION_TABLE = "miofind_alembic"

_FOLDER = Path(__file__).parent
_running = threading.Lock()  # Alembic runs in globals
_LOCK = int.from_bytes(b"miofind", "big")


def revision(connection: Connection) -> str | None:
    """The newest revision that a server has, None where it has no tables of miofind."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT max(version_num) FROM {VERSION_TABLE}")).scalar()


def require(found: str | None, where: str, needed: str = FINDDB) -> None:
    """Do nothing where a server of the revision `found` has the tables of the revision `needed`.

    Raises:
        SchemaVersionError: it is older or newer. DatabaseError: it has none.
    """
    if found is None:
        raise DatabaseError(f"{where} is an empty database: fill it with `miofind tune`, or name another")
    if found not in REVISIONS:
        raise SchemaVersionError(
            f"{where} has the schema {found!r:.40}, which this release of miofind does not know: upgrade miofind, or "
            "name another database"
        )
    if REVISIONS.index(found) < REVISIONS.index(needed):
        raise SchemaVersionError(
            f"{where} has the schema {found}, this release of miofind needs {needed}: run `miofind db upgrade` on it"
        )


def bring_up(connection: Connection, where: str) -> str | None:
    """Make or change a server's tables to be those of this release; returns the revision that was there before.

    In the caller's transaction, for which others that do so wait: all of it is done or nothing.

    Raises:
        SchemaVersionError: a newer release made them.
    """
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    found = revision(connection)
    if found == REVISIONS[-1]:
        return found
    if found is not None:
        require(found, where, REVISIONS[0])
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _running:
        command.upgrade(config, "head")
    return found
