"""The tables of a fleet on PostgreSQL: campaigns, their problems and jobs, who works on them, and what happened.

They stand beside the tables of the FindDB, and none of those names one of these: with all of them dropped no
measurement is lost. `finddb.migrations` makes them.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Float,
    ForeignKey,
    Identity,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    Table,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, UUID

metadata = MetaData()

_C = Text(collation="C")
_AT = DateTime(timezone=True)


def _campaign_id(*, primary_key: bool = False) -> Column[int]:
    return Column("campaign_id", ForeignKey("campaign.id", ondelete="CASCADE"), primary_key=primary_key, nullable=False)


campaign = Table(
    "campaign",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("name", _C, nullable=False, unique=True),
    Column("options", JSONB, nullable=False),
    Column("devices", ARRAY(Text)),  # NULL: of every kind that has workers
    Column("stacks", ARRAY(Text)),
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("paused", Boolean, nullable=False, server_default="false"),
    Column("revision", BigInteger, nullable=False, server_default="0"),  # counts what was submitted under its name
    Column("created_by", _C, nullable=False, server_default=func.current_user()),
    Column("created_at", _AT, nullable=False, server_default=func.now()),
)

campaign_problem = Table(
    "campaign_problem",
    metadata,
    _campaign_id(primary_key=True),
    Column("network_config", _C, primary_key=True),
    Column("suite", _C, nullable=False),
    Column("layer", _C, nullable=False),
    Column("count", Integer, nullable=False),
    Column("estimate_s", Float, nullable=False),
)

# The revision of a campaign that a kind of device has jobs of.
enrolment = Table(
    "enrolment",
    metadata,
    _campaign_id(primary_key=True),
    Column("device", _C, primary_key=True),
    Column("stack", _C, primary_key=True),
    Column("revision", BigInteger, nullable=False),
)

JOB_STATES = ("new", "leased", "done", "failed", "parked")

job = Table(
    "job",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    _campaign_id(),
    Column("device", _C, nullable=False),
    Column("stack", _C, nullable=False),
    Column("network_config", _C, nullable=False),
    Column("suite", _C, nullable=False),
    Column("layer", _C, nullable=False),
    Column("count", Integer, nullable=False),
    Column("estimate_s", Float, nullable=False),
    Column("weight", Float, nullable=False),
    Column("state", _C, CheckConstraint(f"state IN {JOB_STATES}"), nullable=False, server_default="new"),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("losses", SmallInteger, nullable=False, server_default="0"),
    Column("begun", Boolean, nullable=False, server_default="false"),  # as far as its worker has told
    Column("worker_id", UUID(as_uuid=True)),
    Column("lease_until", _AT),
    Column("fence", BigInteger, nullable=False, server_default="0"),  # counts claims: of two holders the later has it
    Column("outcome", _C, nullable=False, server_default=""),
    Column("message", _C, nullable=False, server_default=""),
    Column("seconds", Float, nullable=False, server_default="0"),
    Column("finished_at", _AT),
)

# Every state that a job comes to is written to all of its indexes. So one problem is one job by two hashes of 64 bits:
# the texts would be 200 bytes. And nothing that a renewal or a begin changes is in any, which then write to none.
_TEXTS = "(((device || ' ') || stack) || ' ') || network_config"  # in parentheses as the server tells of it
Index(
    "job_once",
    *(job.c.campaign_id, text(f"hashtextextended({_TEXTS}, 0)"), text(f"hashtextextended({_TEXTS}, 1)")),
    unique=True,
)
Index(
    "job_ready",
    *(job.c.campaign_id, job.c.device, job.c.stack, job.c.weight.desc(), job.c.id),
    postgresql_where=text("state = 'new'"),
)
Index("job_held", job.c.worker_id, postgresql_where=text("state = 'leased'"))

# An agent: a process that has a lease on every job of a batch.
worker = Table(
    "worker",
    metadata,
    Column("id", UUID(as_uuid=True), primary_key=True),
    Column("host", _C, nullable=False),
    Column("version", _C, nullable=False),
    Column("state", _C, CheckConstraint("state IN ('ready', 'draining', 'gone')"), nullable=False),
    Column("outbox_problems", Integer, nullable=False, server_default="0"),
    Column("outbox_age_s", Float, nullable=False, server_default="0"),
    Column("began_at", _AT, nullable=False, server_default=func.now()),
    Column("beat_at", _AT, nullable=False, server_default=func.now()),
)

# What is known of a GPU outlives its agents. The name is its UUID, or that of a host's CPU place.
gpu = Table(
    "gpu",
    metadata,
    Column("name", _C, primary_key=True),
    Column("host", _C, nullable=False),
    Column("device", _C, nullable=False),
    Column("stack", _C, nullable=False),
    Column("worker_id", UUID(as_uuid=True)),
    Column("state", _C, CheckConstraint("state IN ('ready', 'suspect', 'quarantined')"), nullable=False),
    Column("reason", _C, nullable=False, server_default=""),
    Column("factor", Float),
    Column("canaries", JSONB, nullable=False, server_default="{}"),
    Column("strikes", Integer, nullable=False, server_default="0"),
    Column("since", _AT, nullable=False, server_default=func.now()),
)
Index("gpu_kind", gpu.c.device, gpu.c.stack)

# Rows that a GPU measured which was found to be off afterwards. They never ship.
doubt = Table(
    "doubt",
    metadata,
    Column("row_id", _C, primary_key=True),
    Column("gpu", _C, nullable=False),
    Column("reason", _C, nullable=False),
    Column("at", _AT, nullable=False, server_default=func.now()),
)

happening = Table(
    "event",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("at", _AT, nullable=False, server_default=func.now()),
    Column("kind", _C, nullable=False),
    Column("worker_id", UUID(as_uuid=True)),
    Column("job_id", BigInteger),
    Column("detail", JSONB, nullable=False, server_default="{}"),
)
Index("event_at", happening.c.at)

# One row: when expired leases were last looked for, by which an outage of the server is told.
reaper = Table(
    "reaper",
    metadata,
    Column("single", Boolean, CheckConstraint("single"), primary_key=True, server_default="true"),
    Column("reaped_at", _AT, nullable=False, server_default=func.now()),
)
