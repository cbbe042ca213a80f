"""What a fleet's tables hold and nobody needs any more; no measurement is in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import text

from miofind.fleet.database import FleetDatabase
from miofind.fleet.queue import note

# Deleting a campaign deletes its problems, jobs and enrolments. Its row is locked first, as a submit locks it.
_CAMPAIGNS = text("""
DELETE FROM campaign WHERE id IN (
    SELECT id FROM campaign WHERE created_at < now() - make_interval(days => :days)
    AND NOT EXISTS (SELECT FROM job WHERE job.campaign_id = campaign.id AND (state IN ('new', 'leased')
        OR coalesce(finished_at, campaign.created_at) >= now() - make_interval(days => :days)))
    AND EXISTS (SELECT FROM job WHERE job.campaign_id = campaign.id)
    FOR UPDATE SKIP LOCKED)
""")
# A kind is alive where any device of it has an agent that gave a sign of life. Its enrolments go as well, so that it
# gets its jobs again when it is back.
_DEAD_KINDS = """
NOT EXISTS (SELECT FROM gpu JOIN worker ON worker.id = gpu.worker_id
    WHERE gpu.device = {table}.device AND gpu.stack = {table}.stack
    AND worker.beat_at >= now() - make_interval(days => :days))
"""
_ENROLMENTS = text(f"""
DELETE FROM enrolment USING campaign WHERE campaign.id = enrolment.campaign_id
    AND campaign.created_at < now() - make_interval(days => :days) AND {_DEAD_KINDS.format(table="enrolment")}
""")
_JOBS = text(f"""
DELETE FROM job USING campaign WHERE campaign.id = job.campaign_id AND job.state = 'new'
    AND campaign.created_at < now() - make_interval(days => :days) AND {_DEAD_KINDS.format(table="job")}
""")
_GPUS = text("""
DELETE FROM gpu WHERE state = 'ready' AND NOT EXISTS (
    SELECT FROM worker WHERE worker.id = gpu.worker_id AND beat_at >= now() - make_interval(days => :days))
""")
_WORKERS = text("""
DELETE FROM worker WHERE state = 'gone' AND beat_at < now() - make_interval(days => :days)
    AND NOT EXISTS (SELECT FROM gpu WHERE gpu.worker_id = worker.id)
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """How much was removed.

    Attributes:
        campaigns: that ended, with all their jobs.
        jobs: that waited for a kind of device and stack which no agent has.
        gpus: without an agent; what is suspect or quarantined stays.
        agents: that are gone.
    """

    campaigns: int
    jobs: int
    gpus: int
    agents: int


def collect(database: FleetDatabase, days: int, *, dry_run: bool = False) -> Removed:
    """Remove what has not been of use for so many days, in one transaction.

    Raises:
        DatabaseError: the server refuses; the role needs to own the tables.
    """
    with database.transaction() as connection:
        part = connection.begin_nested()
        counts = [connection.execute(each, {"days": days}).rowcount for each in (_CAMPAIGNS, _JOBS)]
        connection.execute(_ENROLMENTS, {"days": days})
        counts += [connection.execute(each, {"days": days}).rowcount for each in (_GPUS, _WORKERS)]
        found = Removed(campaigns=counts[0], jobs=counts[1], gpus=counts[2], agents=counts[3])
        if dry_run:
            part.rollback()
            return found
        part.commit()
        told: dict[str, Any] = {"days": days, "campaigns": found.campaigns, "jobs": found.jobs}
        note(connection, "collected", told)
    return found
