"""How a fleet stands: campaigns and their jobs, devices and agents, and what went wrong last."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import RowMapping, text

from miofind.fleet.database import FleetDatabase
from miofind.fleet.values import JobState

_RECENT_S = 60
_MOST_SHOWN = 20

# Whatever is there: a sum of it is a number.
_WEIGHT = "least(greatest(weight, 0), 1e18)"
_JOBS = text(f"""
SELECT campaign.name, job.device, job.stack, campaign.priority, campaign.paused,
    count(*) FILTER (WHERE state = 'new') AS new, count(*) FILTER (WHERE state = 'leased') AS leased,
    count(*) FILTER (WHERE state = 'done') AS done, count(*) FILTER (WHERE state = 'failed') AS failed,
    count(*) FILTER (WHERE state = 'parked') AS parked,
    coalesce(sum({_WEIGHT}) FILTER (WHERE state IN ('new', 'leased')), 0) AS weight_left,
    coalesce(sum({_WEIGHT}) FILTER (WHERE finished_at > now() - make_interval(secs => :recent_s)), 0) AS weight_recent,
    count(*) FILTER (WHERE finished_at > now() - make_interval(secs => :recent_s)) AS recent
FROM job JOIN campaign ON campaign.id = job.campaign_id
GROUP BY campaign.id, job.device, job.stack ORDER BY campaign.priority DESC, campaign.id, job.device, job.stack
""")
_WAITING = text("""
SELECT campaign.name, campaign.priority, campaign.paused, count(*) AS problems
FROM campaign JOIN campaign_problem ON campaign_problem.campaign_id = campaign.id
WHERE NOT EXISTS (SELECT FROM enrolment WHERE enrolment.campaign_id = campaign.id)
GROUP BY campaign.id ORDER BY campaign.id
""")
_GPUS = text("""
SELECT gpu.name, gpu.host, gpu.device, gpu.stack, gpu.state, gpu.reason, gpu.factor,
    coalesce(worker.state, 'gone') AS worker,
    CASE WHEN isfinite(worker.beat_at) THEN extract(epoch FROM now() - worker.beat_at)::float8 END AS silent_s,
    coalesce(worker.outbox_problems, 0) AS outbox_problems, coalesce(worker.outbox_age_s, 0) AS outbox_age_s
FROM gpu LEFT JOIN worker ON worker.id = gpu.worker_id ORDER BY gpu.device, gpu.host, gpu.name
""")
_FAILURES = text("""
SELECT campaign.name AS campaign, job.device, job.network_config, job.state, job.message
FROM job JOIN campaign ON campaign.id = job.campaign_id
WHERE job.state IN ('failed', 'parked') ORDER BY job.finished_at DESC NULLS LAST, job.id DESC LIMIT :most
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignStatus:
    """The jobs of one campaign for one kind of device.

    Attributes:
        device, stack: "" for a campaign that no kind has enrolled for.
        jobs: how many by state.
        recent: finished in the last minute.
        eta_s: at the pace of the last minute; None where nothing was finished.
    """

    name: str
    device: str
    stack: str
    priority: int
    paused: bool
    jobs: Mapping[JobState, int]
    recent: int = 0
    eta_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStatus:
    """One device that has worked for the fleet.

    Attributes:
        state, reason: of its health.
        factor: times of its canaries over the median of its kind, None where unknown.
        worker: state of its agent: ready, draining or gone.
        silent_s: since its agent's last sign of life.
        outbox_problems, outbox_age_s: what its agent has measured and not merged.
    """

    name: str
    host: str
    device: str
    stack: str
    state: str
    reason: str
    factor: float | None
    worker: str
    silent_s: float | None
    outbox_problems: int
    outbox_age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureStatus:
    """A job that came to nothing."""

    campaign: str
    device: str
    network_config: str
    state: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """How a fleet stands. What the server holds is not made printable: whoever prints it does that."""

    campaigns: tuple[CampaignStatus, ...]
    gpus: tuple[GpuStatus, ...]
    failures: tuple[FailureStatus, ...]


def status(database: FleetDatabase) -> FleetStatus:
    """How a fleet stands.

    Raises:
        DatabaseError: the server cannot be asked.
    """
    with database.transaction() as connection:
        jobs = connection.execute(_JOBS, {"recent_s": _RECENT_S}).mappings().all()
        waiting = connection.execute(_WAITING).mappings().all()
        gpus = connection.execute(_GPUS).mappings().all()
        failures = connection.execute(_FAILURES, {"most": _MOST_SHOWN}).mappings().all()
    return FleetStatus(
        campaigns=(*map(_campaign, jobs), *map(_not_enrolled, waiting)),
        gpus=tuple(GpuStatus(**row) for row in gpus),
        failures=tuple(FailureStatus(**row) for row in failures),
    )


def _campaign(row: RowMapping) -> CampaignStatus:
    pace = row["weight_recent"] / _RECENT_S
    eta_s = row["weight_left"] / pace if pace else math.nan
    return CampaignStatus(
        name=row["name"],
        device=row["device"],
        stack=row["stack"],
        priority=row["priority"],
        paused=row["paused"],
        jobs={state: int(row[state.value]) for state in JobState},
        recent=row["recent"],
        eta_s=eta_s if 0 <= eta_s < math.inf else None,
    )


def _not_enrolled(row: RowMapping) -> CampaignStatus:
    jobs = dict.fromkeys(JobState, 0) | {JobState.NEW: int(row["problems"])}
    return CampaignStatus(
        name=row["name"], device="", stack="", priority=row["priority"], paused=row["paused"], jobs=jobs
    )
