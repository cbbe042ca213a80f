"""The tables of a FindDB; `schema_versions` has their versions. Nothing here opens a file or knows a server.

`measurement`, `scope` and `verdict` are append-only facts named by content; `answer` is derived from them and can be
rebuilt. Numbers that name devices and problems are of one file only: everything that leaves it goes by text.

A release is packed: its answers are compressed and hold all there is, its tables are fewer, and nothing writes to it.

PostgreSQL has the same tables, made by `migrations`. Its texts are compared byte by byte, as SQLite's are.
"""

from __future__ import annotations

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

from miofind.finddb.schema_versions import PACKED_VERSION, SCHEMA_VERSION

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
"""The hot path, where Core's execution costs twice what the query does: `server` gives its text to the driver, and
`sqlite_database`, which does without SQLAlchemy's import, has a text of its own."""


def create(connection: Connection) -> None:
    """Create the tables in an empty database. Runs in the caller's transaction."""
    metadata.create_all(connection, checkfirst=False)
    connection.execute(insert(meta).values(key="schema_version", value=str(SCHEMA_VERSION)))


def create_packed(connection: Connection, notes: Mapping[str, str]) -> None:
    """Create the tables of a release, and what it says of itself. Runs in the caller's transaction."""
    packed_metadata.create_all(connection, checkfirst=False)
    values = {"schema_version": str(PACKED_VERSION), **notes}
    connection.execute(insert(meta), [{"key": key, "value": value} for key, value in values.items()])


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
