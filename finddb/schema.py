"""The tables of a FindDB and their version. Nothing here opens a file or knows a server.

`measurement`, `scope` and `verdict` are append-only facts named by content; `answer` is derived from them and can be
rebuilt. Numbers that name devices and problems are of one file only: everything that leaves it goes by text.

A release is packed: its answers are compressed and hold all there is, its tables are fewer, and nothing writes to it.

PostgreSQL has the same tables, made by `migrations`. Its texts are compared byte by byte, as SQLite's are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    bindparam,
    insert,
    inspect,
    select,
)
from sqlalchemy.dialects import sqlite

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

_NAME = String().with_variant(String(collation="C"), "postgresql")
_TEXT = Text().with_variant(Text(collation="C"), "postgresql")
_NUMBER = Integer().with_variant(BigInteger(), "postgresql")

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("key", _NAME, primary_key=True),
    Column("value", _NAME, nullable=False),
)

device = Table(
    "device",
    metadata,
    Column("id", _NUMBER, primary_key=True),
    Column("identity", _NAME, nullable=False, unique=True),
)

environment = Table(
    "environment",
    metadata,
    Column("id", _NAME, primary_key=True),
    Column("versions", _TEXT, nullable=False),
)

problem = Table(
    "problem",
    metadata,
    Column("id", _NUMBER, primary_key=True),
    Column("device_id", ForeignKey(device.c.id), nullable=False),
    Column("network_config", _NAME, nullable=False),
    UniqueConstraint("device_id", "network_config"),
)


def _problem_id() -> Column[int]:
    return Column("problem_id", ForeignKey(problem.c.id, ondelete="CASCADE"), primary_key=True)


# Clustered by problem: a rebuild reads one problem's rows in one run, and no second index is kept.
measurement = Table(
    "measurement",
    metadata,
    _problem_id(),
    Column("id", _NAME, primary_key=True),
    Column("solver_id", _NAME, nullable=False),
    Column("solver_version", BigInteger, nullable=False),
    Column("config", _TEXT, nullable=False),
    Column("status", _NAME, nullable=False),
    Column("algorithm", _NAME, nullable=False),
    Column("library", _NAME, nullable=False),
    Column("source_hash", _NAME, nullable=False),
    Column("kernel_hash", _NAME, nullable=False),
    Column("message", _TEXT, nullable=False),
    Column("time_ms", Float),
    Column("min_ms", Float),
    Column("p20_ms", Float),
    Column("p80_ms", Float),
    Column("samples", BigInteger, nullable=False),
    Column("protocol", _NAME, nullable=False),
    Column("workspace_bytes", BigInteger, nullable=False),
    Column("deterministic", Boolean, nullable=False),
    Column("max_error", Float),
    Column("environment", _NAME, nullable=False),
    Column("created_at", _NAME, nullable=False),
    Column("contended", Boolean, nullable=False, server_default="0", info={"since": 2}),
    Column("dropped_samples", BigInteger, nullable=False, server_default="0", info={"since": 2}),
    sqlite_with_rowid=False,
)

scope = Table(
    "scope",
    metadata,
    _problem_id(),
    Column("id", _NAME, primary_key=True),
    Column("solvers", _TEXT, nullable=False),
    Column("filters", _TEXT, nullable=False),
    Column("workspace_limit_bytes", BigInteger),
    Column("effort", _NAME, nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("created_at", _NAME, nullable=False),
    sqlite_with_rowid=False,
)

verdict = Table(
    "verdict",
    metadata,
    _problem_id(),
    Column("id", _NAME, primary_key=True),
    Column("winner", _TEXT, nullable=False),
    Column("ties", _TEXT, nullable=False),
    Column("comparisons", _TEXT, nullable=False),
    Column("blocks", BigInteger, nullable=False),
    Column("protocol", _NAME, nullable=False),
    Column("environment", _NAME, nullable=False),
    Column("created_at", _NAME, nullable=False),
    sqlite_with_rowid=False,
    info={"since": 2},
)

recheck = Table(
    "recheck",
    metadata,
    Column("device", _NAME, primary_key=True),
    Column("network_config", _NAME, primary_key=True),
    Column("reason", _NAME, primary_key=True),
    Column("created_at", _NAME, nullable=False),
    sqlite_with_rowid=False,
)

answer = Table(
    "answer",
    metadata,
    Column("problem_id", ForeignKey(problem.c.id, ondelete="CASCADE"), primary_key=True),
    Column("payload", _TEXT, nullable=False),
)

server_metadata = MetaData()
"""Of what a server has beside."""

# Rows stay when their problem goes: a mirror learns of that, too.
change = Table(
    "change",
    server_metadata,
    Column("device", _NAME, primary_key=True),
    Column("network_config", _NAME, primary_key=True),
    Column("transaction", BigInteger, nullable=False, index=True),
)

packed_metadata = MetaData()
for _table in (meta, device, environment, recheck):
    _table.to_metadata(packed_metadata)

packed_answer = Table(
    "answer",
    packed_metadata,
    Column("problem_id", Integer, primary_key=True),
    Column("payload", LargeBinary, nullable=False),
)

# Clustered by its key, which an index would hold a second time.
packed_problem = Table(
    "problem",
    packed_metadata,
    Column("device_id", ForeignKey("device.id"), primary_key=True),
    Column("network_config", String, primary_key=True),
    Column("id", ForeignKey(packed_answer.c.problem_id), nullable=False),
    sqlite_with_rowid=False,
)

ANSWER_QUERY = (
    select(answer.c.payload)
    .select_from(device)
    .join(problem, problem.c.device_id == device.c.id)
    .join(answer, answer.c.problem_id == problem.c.id)
    .where(device.c.identity == bindparam("device"), problem.c.network_config == bindparam("network_config"))
)
ANSWER_SQL = str(ANSWER_QUERY.compile(dialect=sqlite.dialect(paramstyle="named")))
"""The same for SQLite's own cursor: on the hot path Core's execution costs twice what the query does."""


def is_empty(connection: Connection) -> bool:
    """Whether the database holds no table at all."""
    return not _stored_objects(connection)


def create(connection: Connection) -> None:
    """Create the tables, unless another process has done so meanwhile. Runs in the caller's transaction."""
    if is_empty(connection):
        metadata.create_all(connection, checkfirst=False)
        connection.execute(insert(meta).values(key="schema_version", value=str(SCHEMA_VERSION)))


def create_packed(connection: Connection, notes: Mapping[str, str]) -> None:
    """Create the tables of a release, and what it says of itself. Runs in the caller's transaction."""
    packed_metadata.create_all(connection, checkfirst=False)
    values = {"schema_version": str(PACKED_VERSION), **notes}
    connection.execute(insert(meta), [{"key": key, "value": value} for key, value in values.items()])


def note(connection: Connection, key: str) -> str | None:
    """What a file says of itself, such as "schema_version"; None where it says nothing."""
    return connection.execute(select(meta.c.value).where(meta.c.key == key)).scalar()


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


def checked_version(connection: Connection, where: str) -> int:
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


def column_findings(connection: Connection, version: int) -> list[str]:
    """Tables and columns that a database of that version lacks, one line each."""
    inspector = inspect(connection)
    present = set(inspector.get_table_names())
    findings = []
    for table in (packed_metadata if version == PACKED_VERSION else metadata).sorted_tables:
        if version < table.info.get("since", 1):
            continue
        if table.name not in present:
            findings.append(f"table {table.name} is missing")
            continue
        wanted = [column.name for column in table.columns if version >= column.info.get("since", 1)]
        columns = {column["name"] for column in inspector.get_columns(table.name)}
        findings += [f"column {table.name}.{name} is missing" for name in wanted if name not in columns]
    return findings


def _stored_objects(connection: Connection) -> dict[str, bool]:
    """What the database is made of, by name; False for what has no pages of its own but computes: views, triggers."""
    found = connection.exec_driver_sql("SELECT name, rootpage FROM sqlite_master")
    return {name: bool(page) for name, page in found}


def _version(connection: Connection) -> int | None:
    if not {"key", "value"} <= {column["name"] for column in inspect(connection).get_columns("meta")}:
        return None
    text = note(connection, "schema_version")
    return int(text) if isinstance(text, str) and re.fullmatch("[1-9][0-9]{0,8}", text) else None
