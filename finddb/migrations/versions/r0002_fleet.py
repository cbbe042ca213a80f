"""The tables of a fleet: campaigns, their jobs, and who works on them."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002_fleet"
down_revision = "0001_finddb"
branch_labels = None
depends_on = None

_C = sa.Text(collation="C")
_AT = sa.DateTime(timezone=True)
_NOW = sa.text("now()")


def upgrade() -> None:
    """Make the tables."""
    _create_campaigns()
    _create_jobs()
    op.create_table(
        "worker",
        sa.Column("id", sa.UUID(), primary_key=True),
        sa.Column("host", _C, nullable=False),
        sa.Column("version", _C, nullable=False),
        sa.Column("state", _C, sa.CheckConstraint("state IN ('ready', 'draining', 'gone')"), nullable=False),
        sa.Column("outbox_problems", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("outbox_age_s", sa.Float(), nullable=False, server_default="0"),
        sa.Column("began_at", _AT, nullable=False, server_default=_NOW),
        sa.Column("beat_at", _AT, nullable=False, server_default=_NOW),
    )
    op.create_table(
        "gpu",
        sa.Column("name", _C, primary_key=True),
        sa.Column("host", _C, nullable=False),
        sa.Column("device", _C, nullable=False),
        sa.Column("stack", _C, nullable=False),
        sa.Column("worker_id", sa.UUID()),
        sa.Column("state", _C, sa.CheckConstraint("state IN ('ready', 'suspect', 'quarantined')"), nullable=False),
        sa.Column("reason", _C, nullable=False, server_default=""),
        sa.Column("factor", sa.Float()),
        sa.Column("canaries", postgresql.JSONB(), nullable=False, server_default="{}"),
        sa.Column("strikes", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("since", _AT, nullable=False, server_default=_NOW),
    )
    op.create_index("gpu_kind", "gpu", ["device", "stack"])
    op.create_table(
        "doubt",
        sa.Column("row_id", _C, primary_key=True),
        sa.Column("gpu", _C, nullable=False),
        sa.Column("reason", _C, nullable=False),
        sa.Column("at", _AT, nullable=False, server_default=_NOW),
    )
    op.create_table(
        "event",
        sa.Column("id", sa.BigInteger(), sa.Identity(), primary_key=True),
        sa.Column("at", _AT, nullable=False, server_default=_NOW),
        sa.Column("kind", _C, nullable=False),
        sa.Column("worker_id", sa.UUID()),
        sa.Column("job_id", sa.BigInteger()),
        sa.Column("detail", postgresql.JSONB(), nullable=False, server_default="{}"),
    )
    op.create_index("event_at", "event", ["at"])
    op.create_table(
        "reaper",
        sa.Column("single", sa.Boolean(), sa.CheckConstraint("single"), primary_key=True, server_default="true"),
        sa.Column("reaped_at", _AT, nullable=False, server_default=_NOW),
    )


def downgrade() -> None:
    """Remove the tables; no measurement is in them."""
    for name in ("reaper", "event", "doubt", "gpu", "worker", "job", "enrolment", "campaign_problem", "campaign"):
        op.drop_table(name)


def _create_campaigns() -> None:
    op.create_table(
        "campaign",
        sa.Column("id", sa.BigInteger(), sa.Identity(), primary_key=True),
        sa.Column("name", _C, nullable=False, unique=True),
        sa.Column("options", postgresql.JSONB(), nullable=False),
        sa.Column("devices", postgresql.ARRAY(sa.Text())),
        sa.Column("stacks", postgresql.ARRAY(sa.Text())),
        sa.Column("priority", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("paused", sa.Boolean(), nullable=False, server_default="false"),
        sa.Column("revision", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("created_by", _C, nullable=False, server_default=sa.text("CURRENT_USER")),
        sa.Column("created_at", _AT, nullable=False, server_default=_NOW),
    )
    op.create_table(
        "campaign_problem",
        _campaign_id(primary_key=True),
        sa.Column("network_config", _C, primary_key=True),
        sa.Column("suite", _C, nullable=False),
        sa.Column("layer", _C, nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("estimate_s", sa.Float(), nullable=False),
    )
    op.create_table(
        "enrolment",
        _campaign_id(primary_key=True),
        sa.Column("device", _C, primary_key=True),
        sa.Column("stack", _C, primary_key=True),
        sa.Column("revision", sa.BigInteger(), nullable=False),
    )


def _create_jobs() -> None:
    states = "state IN ('new', 'leased', 'done', 'failed', 'parked')"
    op.create_table(
        "job",
        sa.Column("id", sa.BigInteger(), sa.Identity(), primary_key=True),
        _campaign_id(),
        sa.Column("device", _C, nullable=False),
        sa.Column("stack", _C, nullable=False),
        sa.Column("network_config", _C, nullable=False),
        sa.Column("suite", _C, nullable=False),
        sa.Column("layer", _C, nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("estimate_s", sa.Float(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("state", _C, sa.CheckConstraint(states), nullable=False, server_default="new"),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("losses", sa.SmallInteger(), nullable=False, server_default="0"),
        sa.Column("begun", sa.Boolean(), nullable=False, server_default="false"),
        sa.Column("worker_id", sa.UUID()),
        sa.Column("lease_until", _AT),
        sa.Column("fence", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("outcome", _C, nullable=False, server_default=""),
        sa.Column("message", _C, nullable=False, server_default=""),
        sa.Column("seconds", sa.Float(), nullable=False, server_default="0"),
        sa.Column("finished_at", _AT),
        sa.UniqueConstraint("campaign_id", "device", "stack", "network_config"),
    )
    ready: list[str | sa.TextClause] = ["campaign_id", "device", "stack", sa.text("weight DESC"), "id"]
    op.create_index("job_ready", "job", ready, postgresql_where=sa.text("state = 'new'"))
    op.create_index("job_leased", "job", ["lease_until"], postgresql_where=sa.text("state = 'leased'"))
    op.create_index("job_held", "job", ["worker_id"], postgresql_where=sa.text("state = 'leased'"))
    # Of 300,000 jobs the claimed ones leave dead entries at the head of job_ready, which every claim reads past until
    # they are vacuumed: 800 pages, 12 ms. A share of the table is too many.
    op.execute(
        "ALTER TABLE job SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, "
        "autovacuum_vacuum_cost_delay = 0)"
    )


def _campaign_id(*, primary_key: bool = False) -> sa.Column[int]:
    key = sa.ForeignKey("campaign.id", ondelete="CASCADE")
    return sa.Column("campaign_id", sa.BigInteger(), key, primary_key=primary_key, nullable=False)
