"""Campaigns and jobs of fleets in tests, and how they stand on the server."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import text

from miofind.core.problem import ProblemDescription
from miofind.fleet.campaigns import submit
from miofind.fleet.database import FleetDatabase
from miofind.fleet.queue import Queue
from miofind.fleet.values import CampaignRequest, Finish, Hold, Kind, Submitted
from miofind.suites import SuiteProblem
from miofind.tune.values import TuneOptions

KIND, OTHER = Kind(device="A|1|9.0|", stack="s1"), Kind(device="A|1|9.0|", stack="s2")
NIGHTLY = CampaignRequest(name="nightly", options=TuneOptions())


def problems(count: int) -> list[SuiteProblem]:
    return [
        SuiteProblem(
            problem=ProblemDescription.convolution(x=(1, 2, 4, 4), w=(k, 2, 3, 3)),
            suite="s",
            layer=f"layer{k}",
            count=1,
        )
        for k in range(1, count + 1)
    ]


def heavier_with_k(problem: ProblemDescription) -> float:
    return float(problem.k)


def submitted(
    database: FleetDatabase, count: int = 3, request: CampaignRequest = NIGHTLY, kind: Kind = KIND
) -> Submitted:
    found = submit(database, request, problems(count), heavier_with_k)
    Queue(database).enrol(kind)
    return found


def scalar(database: FleetDatabase, statement: str, **values: object) -> object:
    with database.transaction() as connection:
        return connection.execute(text(statement), values).scalar()


def states(database: FleetDatabase) -> dict[str, int]:
    with database.transaction() as connection:
        found = connection.execute(text("SELECT state, count(*) FROM job GROUP BY state")).all()
        return {str(state): int(count) for state, count in found}


def expire(database: FleetDatabase) -> None:
    """Let all leases run out on the server's clock, the only one there is."""
    with database.transaction() as connection:
        connection.execute(text("UPDATE job SET lease_until = now() - interval '1 s' WHERE state = 'leased'"))


def holds(queue: Queue, worker: UUID, most: int = 1, kind: Kind = KIND) -> list[Hold]:
    return [claimed.hold for claimed in queue.claim(worker, kind, most)]


def done(hold: Hold) -> Finish:
    return Finish(hold=hold, outcome="tuned", seconds=0.5)
