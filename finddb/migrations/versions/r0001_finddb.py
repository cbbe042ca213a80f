"""The tables of a FindDB."""

import sqlalchemy as sa
from alembic import op

revision = "0001_finddb"
down_revision = None
branch_labels = None
depends_on = None

_NAME = sa.String(collation="C")
_TEXT = sa.Text(collation="C")


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "meta",
        sa.Column("key", _NAME, primary_key=True),
        sa.Column("value", _NAME, nullable=False),
    )
    op.create_table(
        "device",
        sa.Column("id", sa.BigInteger(), primary_key=True),
        sa.Column("identity", _NAME, nullable=False, unique=True),
    )
    op.create_table(
        "environment",
        sa.Column("id", _NAME, primary_key=True),
        sa.Column("versions", _TEXT, nullable=False),
    )
    op.create_table(
        "problem",
        sa.Column("id", sa.BigInteger(), primary_key=True),
        sa.Column("device_id", sa.BigInteger(), sa.ForeignKey("device.id"), nullable=False),
        sa.Column("network_config", _NAME, nullable=False),
        sa.UniqueConstraint("device_id", "network_config"),
    )
    _create_facts()
    op.create_table(
        "recheck",
        sa.Column("device", _NAME, primary_key=True),
        sa.Column("network_config", _NAME, primary_key=True),
        sa.Column("reason", _NAME, primary_key=True),
        sa.Column("created_at", _NAME, nullable=False),
    )
    op.create_table(
        "answer",
        _problem_id(),
        sa.Column("payload", _TEXT, nullable=False),
    )
    op.create_table(
        "change",
        sa.Column("device", _NAME, primary_key=True),
        sa.Column("network_config", _NAME, primary_key=True),
        sa.Column("transaction", sa.BigInteger(), nullable=False, index=True),
    )


def downgrade() -> None:
    """Remove the tables, and all they hold."""
    for name in ("change", "answer", "recheck", "verdict", "scope", "measurement", "problem", "environment", "device"):
        op.drop_table(name)
    op.drop_table("meta")


def _create_facts() -> None:
    op.create_table(
        "measurement",
        _problem_id(),
        sa.Column("id", _NAME, primary_key=True),
        sa.Column("solver_id", _NAME, nullable=False),
        sa.Column("solver_version", sa.BigInteger(), nullable=False),
        sa.Column("config", _TEXT, nullable=False),
        sa.Column("status", _NAME, nullable=False),
        sa.Column("algorithm", _NAME, nullable=False),
        sa.Column("library", _NAME, nullable=False),
        sa.Column("source_hash", _NAME, nullable=False),
        sa.Column("kernel_hash", _NAME, nullable=False),
        sa.Column("message", _TEXT, nullable=False),
        sa.Column("time_ms", sa.Float()),
        sa.Column("min_ms", sa.Float()),
        sa.Column("p20_ms", sa.Float()),
        sa.Column("p80_ms", sa.Float()),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("protocol", _NAME, nullable=False),
        sa.Column("workspace_bytes", sa.BigInteger(), nullable=False),
        sa.Column("deterministic", sa.Boolean(), nullable=False),
        sa.Column("max_error", sa.Float()),
        sa.Column("environment", _NAME, nullable=False),
        sa.Column("created_at", _NAME, nullable=False),
        sa.Column("contended", sa.Boolean(), nullable=False, server_default="0"),
        sa.Column("dropped_samples", sa.BigInteger(), nullable=False, server_default="0"),
    )
    op.create_table(
        "scope",
        _problem_id(),
        sa.Column("id", _NAME, primary_key=True),
        sa.Column("solvers", _TEXT, nullable=False),
        sa.Column("filters", _TEXT, nullable=False),
        sa.Column("workspace_limit_bytes", sa.BigInteger()),
        sa.Column("effort", _NAME, nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("created_at", _NAME, nullable=False),
    )
    op.create_table(
        "verdict",
        _problem_id(),
        sa.Column("id", _NAME, primary_key=True),
        sa.Column("winner", _TEXT, nullable=False),
        sa.Column("ties", _TEXT, nullable=False),
        sa.Column("comparisons", _TEXT, nullable=False),
        sa.Column("blocks", sa.BigInteger(), nullable=False),
        sa.Column("protocol", _NAME, nullable=False),
        sa.Column("environment", _NAME, nullable=False),
        sa.Column("created_at", _NAME, nullable=False),
    )


def _problem_id() -> sa.Column[int]:
    """The column that names the problem of a fact; the problem takes its facts with it."""
    return sa.Column("problem_id", sa.BigInteger(), sa.ForeignKey("problem.id", ondelete="CASCADE"), primary_key=True)
