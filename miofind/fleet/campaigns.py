"""Campaigns: problems that are to be tuned under a name, and what people do with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, select, text
from sqlalchemy.dialects.postgresql import insert

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import DatabaseError, InvalidOptionError, brief
from miofind.fleet import schema
from miofind.fleet.campaign_options import options_json
from miofind.fleet.database import FleetDatabase
from miofind.fleet.queue import enrol, note
from miofind.fleet.values import CampaignRequest, JobState, Kind, Submitted
from miofind.measure.effort import Effort
from miofind.suites import SuiteProblem
from miofind.text.printable import printable_name
from miofind.tune.cost import rough_seconds

MOST_PRIORITY = 1_000_000
_BATCH = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)

_ADD = text("""
INSERT INTO campaign_problem (campaign_id, network_config, suite, layer, count, estimate_s)
VALUES (:campaign, :network_config, :suite, :layer, :count, :estimate_s)
ON CONFLICT (campaign_id, network_config) DO NOTHING
""")
_AT_WORK = text(
    "SELECT DISTINCT gpu.device, gpu.stack FROM gpu JOIN worker ON worker.id = gpu.worker_id "
    "WHERE worker.state <> 'gone' AND gpu.state <> 'quarantined' ORDER BY gpu.device, gpu.stack"
)


def checked_name(name: str) -> str:
    """The name of a campaign.

    Raises:
        InvalidOptionError: it is none.
    """
    if not _NAME.fullmatch(name):
        raise InvalidOptionError(
            f"name={brief(name)} names no campaign: write up to 100 letters, digits, dots, dashes and underscores"
        )
    return name


def submit(
    database: FleetDatabase,
    request: CampaignRequest,
    problems: Sequence[SuiteProblem],
    seconds_of: Callable[[ProblemDescription], float] | None = None,
) -> Submitted:
    """Have problems tuned; a campaign of that name is added to, so that to resume one is to submit it again.

    Args:
        seconds_of: how long measuring a problem may take, which orders the work; None for what it takes a large GPU.

    Raises:
        InvalidOptionError: the name or the priority is none.
        DatabaseError: the campaign has other options, or the server refuses.
    """
    checked_name(request.name)
    if request.priority is not None and not -MOST_PRIORITY <= request.priority <= MOST_PRIORITY:
        raise InvalidOptionError(f"priority={request.priority} must be within {MOST_PRIORITY} of 0")
    estimate = seconds_of or nominal_seconds(request)
    rows: list[dict[str, Any]] = [
        {
            "network_config": each.problem.network_config,
            "suite": printable_name(each.suite),
            "layer": printable_name(each.layer),
            "count": each.count,
            "estimate_s": estimate(each.problem),
        }
        for each in sorted(problems, key=lambda each: each.problem.network_config)
    ]
    with database.transaction() as connection:
        campaign = _campaign(connection, request)
        before = _problems(connection, campaign)
        for start in range(0, len(rows), _BATCH):
            connection.execute(_ADD, [row | {"campaign": campaign} for row in rows[start : start + _BATCH]])
        count = _problems(connection, campaign)
        connection.execute(
            text("UPDATE campaign SET revision = revision + 1 WHERE id = :campaign"), {"campaign": campaign}
        )
        jobs = sum(enrol(connection, Kind(device=row[0], stack=row[1])) for row in connection.execute(_AT_WORK).all())
        note(connection, "submitted", {"campaign": request.name, "added": count - before})
    return Submitted(campaign=campaign, problems=count, added=count - before, jobs=jobs)


def set_paused(database: FleetDatabase, name: str, *, paused: bool) -> None:
    """Have no further job of a campaign claimed, or have them claimed again.

    Raises:
        DatabaseError: there is no such campaign.
    """
    with database.transaction() as connection:
        campaign = number_of(connection, name)
        connection.execute(
            text("UPDATE campaign SET paused = :paused WHERE id = :campaign"), {"paused": paused, "campaign": campaign}
        )
        note(connection, "paused" if paused else "resumed", {"campaign": name})


def retry(database: FleetDatabase, name: str, states: Sequence[JobState] = (JobState.FAILED, JobState.PARKED)) -> int:
    """Have jobs of a campaign measured again that came to nothing; returns how many.

    Raises:
        DatabaseError: there is no such campaign.
    """
    statement = text(
        "UPDATE job SET state = 'new', attempts = 0, losses = 0, outcome = '', message = '', worker_id = NULL, "
        "finished_at = NULL WHERE campaign_id = :campaign AND state = ANY(CAST(:states AS text[]))"
    )
    with database.transaction() as connection:
        values = {"campaign": number_of(connection, name), "states": [state.value for state in states]}
        count = connection.execute(statement, values).rowcount
        note(connection, "retried", {"campaign": name, "jobs": count})
        return count


def number_of(connection: Connection, name: str) -> int:
    """The number of a campaign.

    Raises:
        DatabaseError: there is none of that name; the message lists those there are.
    """
    table = schema.campaign.c
    number = connection.execute(select(table.id).where(table.name == name)).scalar()
    if number is None:
        known = connection.execute(select(table.name).order_by(table.id.desc()).limit(20)).scalars().all()
        raise DatabaseError(f"there is no campaign {brief(name)}: there are {', '.join(known) or 'none yet'}")
    return int(number)


def _campaign(connection: Connection, request: CampaignRequest) -> int:
    """The campaign of that name, made where there is none, and locked.

    Raises:
        DatabaseError: it has other options.
    """
    options = options_json(request.options)
    values = {"name": request.name, "options": options, "devices": request.devices, "stacks": request.stacks}
    table = schema.campaign
    connection.execute(insert(table).values(values).on_conflict_do_nothing())
    found = connection.execute(
        select(table.c.id, table.c.options, table.c.devices, table.c.stacks)
        .where(table.c.name == request.name)
        .with_for_update(key_share=True)  # agents enrol meanwhile: FOR UPDATE would wait for their keys
    ).one()
    same = (found.options, _names(found.devices), _names(found.stacks))
    if same != (options, _names(request.devices), _names(request.stacks)):
        raise DatabaseError(
            f"the campaign {request.name} has other options or other devices: submit under another name"
        )
    if request.priority is not None:
        connection.execute(table.update().where(table.c.id == found.id).values(priority=request.priority))
    return int(found.id)


def _names(values: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(sorted(values))


def _problems(connection: Connection, campaign: int) -> int:
    statement = text("SELECT count(*) FROM campaign_problem WHERE campaign_id = :campaign")
    return int(connection.execute(statement, {"campaign": campaign}).scalar_one())


def nominal_seconds(request: CampaignRequest) -> Callable[[ProblemDescription], float]:
    """How long measuring a problem takes a large GPU, by its size alone: what orders the work of all kinds."""
    device = Device.virtual("90a")
    effort = Effort.TUNE if request.options.find.searches else Effort.FIND
    return lambda problem: rough_seconds(problem, device, effort)
