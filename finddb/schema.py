"""The tables of a FindDB and their version. Nothing here opens a file.

`measurement` and `scope` are append-only facts named by content; `answer` is derived from them and can be rebuilt.
Numbers that name devices and problems are of one file only: everything that leaves it goes by text.
"""

from __future__ import annotations

import re

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    ForeignKey,
    Integer,
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

SCHEMA_VERSION = 1

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("key", String, primary_key=True),
    Column("value", String, nullable=False),
)

device = Table(
    "device",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("identity", String, nullable=False, unique=True),
)

environment = Table(
    "environment",
    metadata,
    Column("id", String, primary_key=True),
    Column("versions", Text, nullable=False),
)

problem = Table(
    "problem",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("device_id", ForeignKey(device.c.id), nullable=False),
    Column("network_config", String, nullable=False),
    UniqueConstraint("device_id", "network_config"),
)


def _problem_id() -> Column[int]:
    return Column("problem_id", ForeignKey(problem.c.id, ondelete="CASCADE"), primary_key=True)


# Clustered by problem: a rebuild reads one problem's rows in one run, and no second index is kept.
measurement = Table(
    "measurement",
    metadata,
    _problem_id(),
    Column("id", String, primary_key=True),
    Column("solver_id", String, nullable=False),
    Column("solver_version", BigInteger, nullable=False),
    Column("config", Text, nullable=False),
    Column("status", String, nullable=False),
    Column("algorithm", String, nullable=False),
    Column("library", String, nullable=False),
    Column("source_hash", String, nullable=False),
    Column("kernel_hash", String, nullable=False),
    Column("message", Text, nullable=False),
    Column("time_ms", Float),
    Column("min_ms", Float),
    Column("p20_ms", Float),
    Column("p80_ms", Float),
    Column("samples", BigInteger, nullable=False),
    Column("protocol", String, nullable=False),
    Column("workspace_bytes", BigInteger, nullable=False),
    Column("deterministic", Boolean, nullable=False),
    Column("max_error", Float),
    Column("environment", String, nullable=False),
    Column("created_at", String, nullable=False),
    sqlite_with_rowid=False,
)

scope = Table(
    "scope",
    metadata,
    _problem_id(),
    Column("id", String, primary_key=True),
    Column("solvers", Text, nullable=False),
    Column("filters", Text, nullable=False),
    Column("workspace_limit_bytes", BigInteger),
    Column("effort", String, nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("created_at", String, nullable=False),
    sqlite_with_rowid=False,
)

recheck = Table(
    "recheck",
    metadata,
    Column("device", String, primary_key=True),
    Column("network_config", String, primary_key=True),
    Column("reason", String, primary_key=True),
    Column("created_at", String, nullable=False),
    sqlite_with_rowid=False,
)

answer = Table(
    "answer",
    metadata,
    Column("problem_id", ForeignKey(problem.c.id, ondelete="CASCADE"), primary_key=True),
    Column("payload", Text, nullable=False),
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
    return not inspect(connection).get_table_names()


def create(connection: Connection) -> None:
    """Create the tables, unless another process has done so meanwhile. Runs in the caller's transaction."""
    if is_empty(connection):
        metadata.create_all(connection, checkfirst=False)
        connection.execute(insert(meta).values(key="schema_version", value=str(SCHEMA_VERSION)))


def check_version(connection: Connection, where: str) -> None:
    """Refuse a database that this release does not read.

    Raises:
        SchemaVersionError: a newer schema.
        DatabaseError: no FindDB at all.
    """
    version = _version(connection)
    if version is None:
        raise DatabaseError(f"{where} is a database of something else, not a FindDB: name another file")
    if version > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{where} has schema version {version}, this release of miofind reads {SCHEMA_VERSION}: "
            "upgrade miofind, or name another file"
        )


def column_findings(connection: Connection) -> list[str]:
    """Tables and columns that are missing, one line each."""
    inspector = inspect(connection)
    present = set(inspector.get_table_names())
    findings = []
    for table in metadata.sorted_tables:
        if table.name not in present:
            findings.append(f"table {table.name} is missing")
            continue
        wanted = [column.name for column in table.columns]
        columns = {column["name"] for column in inspector.get_columns(table.name)}
        findings += [f"column {table.name}.{name} is missing" for name in wanted if name not in columns]
    return findings


def _version(connection: Connection) -> int | None:
    if "meta" not in inspect(connection).get_table_names():
        return None
    if not {"key", "value"} <= {column["name"] for column in inspect(connection).get_columns("meta")}:
        return None
    text = connection.execute(select(meta.c.value).where(meta.c.key == "schema_version")).scalar()
    return int(text) if isinstance(text, str) and re.fullmatch("[1-9][0-9]{0,8}", text) else None
