"""Indexes that cost a claim of a fleet's jobs less: one is gone, and the unique one holds hashes instead of texts."""

import sqlalchemy as sa
from alembic import op

revision = "0003_claims"
down_revision = "0002_fleet"
branch_labels = None
depends_on = None

_TEXTS = ["campaign_id", "device", "stack", "network_config"]
_OF_TEXTS = "job_campaign_id_device_stack_network_config_key"  # the name that PostgreSQL gave it


def upgrade() -> None:
    """Change the indexes; the jobs stay. Agents that are at work wait meanwhile."""
    op.execute("LOCK TABLE job")  # first: who has read it and is about to write would wait for this, and this for it
    op.create_index("job_once", "job", ["campaign_id", _hash(0), _hash(1)], unique=True)
    op.drop_constraint(_OF_TEXTS, "job")
    # A renewal changes lease_until: while that is in an index, each renewal writes to all of them.
    op.drop_index("job_leased", "job")


def downgrade() -> None:
    """Have the indexes of the revision before."""
    op.create_index("job_leased", "job", ["lease_until"], postgresql_where=sa.text("state = 'leased'"))
    op.create_unique_constraint(_OF_TEXTS, "job", _TEXTS)
    op.drop_index("job_once", "job")


def _hash(seed: int) -> sa.TextClause:
    return sa.text(f"hashtextextended(device || ' ' || stack || ' ' || network_config, {seed})")
